"""
Tests of sweep.py and of the studies: python -m pytest -q experiments/test_sweep.py

One study is trained by train.py itself and killed on the way; for the rest a stand-in of a few lines writes what train.py writes.
The published figures are typed from the papers' tables.
"""
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import prepare
import sweep
from configurator import ConfigError
from model import GPT, GPTConfig
from studies.study import load, read_metrics

torch.set_num_threads(1)
STUDIES = sorted(p for p in (HERE / 'studies').glob('*.py') if p.name != 'study.py')
TINY = dict(n_layer=1, n_head=1, n_embd=16, n_pos=32, block_size=32, batch_size=4, gradient_accumulation_steps=1, max_iters=6,
            lr_decay_iters=6, warmup_iters=1, eval_interval=6, log_interval=2, device='cpu', compile='False')


@pytest.fixture(scope='module')
def toy(tmp_path_factory):
    """A folder with a corpus of 6 KB, a token a byte."""
    folder = tmp_path_factory.mktemp('toy')
    (folder / 'toy.txt').write_text(''.join(f'{i} and {i} make {2 * i}\n' for i in range(300)))
    prepare.prepare('text', input=str(folder / 'toy.txt'), tokenizer='byte', out='toy', data_dir=str(folder))
    return folder / 'toy'


@pytest.fixture
def world(toy, tmp_path, monkeypatch, capsys):
    """world(cells=..., ...) writes the study; world.run(flags) sweeps it and returns (exit status, what it printed)."""
    (tmp_path / 'tiny.py').write_text('\n'.join(f'{k} = {v!r}' for k, v in (TINY | dict(dataset=str(toy))).items()))
    monkeypatch.setattr(sweep, 'POLL', 0.02)
    monkeypatch.setenv('OMP_NUM_THREADS', '1')  # the models are tiny

    def write(cells, seeds=(1,), name='made', **more):
        names = dict(scales=dict(cpu=dict(config=str(tmp_path / 'tiny.py'), seeds=list(seeds))), cells=cells) | more
        world.path = tmp_path / f'{name}.py'
        world.path.write_text('"""A study of the tests.\n\nMore."""\n' + '\n'.join(f'{k} = {v!r}' for k, v in names.items()))

    def run(*flags):
        status = sweep.main([str(world.path), f'--out={tmp_path}/out', *flags])
        return status, capsys.readouterr().out

    def refused(*flags):
        with pytest.raises((SystemExit, ConfigError)) as e:
            run(*flags)
        message, out = str(e.value), capsys.readouterr().out
        assert not out
        return message

    world = SimpleNamespace(write=write, run=run, refused=refused, tmp=tmp_path, out=tmp_path / 'out', path=None)
    return world


# A stand-in for train.py: its flags and files, no training. prompt says what is to go wrong.
STAND_IN = f'''
import json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(HERE.parent)!r})
from configurator import run_config
def value(text):
    try:
        return json.loads(text)
    except ValueError:
        return text
flags = {{k: value(v) for k, v in (arg[2:].split('=', 1) for arg in sys.argv[2:])}}
config, folder = run_config(Path(sys.argv[1])) | flags, flags['out_dir']
print('at work', os.environ['OMP_NUM_THREADS'])
if config.get('prompt') == 'fail':
    print('error: no luck\\n  at all')
    sys.exit(1)
if config.get('prompt') == 'wait':
    def stop(*_):
        open(folder + '/told', 'w').close()
        sys.exit(143)
    signal.signal(signal.SIGTERM, stop)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
end = config['max_iters']
with open(folder + '/metrics.jsonl', 'a') as f:
    for record in dict(step=0, config=config), dict(step=end, loss=1.0, tok_s=100.0), dict(step=end, val_loss=1.0):
        f.write(json.dumps(record) + '\\n')
if config.get('prompt') != 'unsaved':
    open(folder + '/last.pt', 'w').close()
'''


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / 'stand_in.py').write_text(STAND_IN)
    monkeypatch.setattr(sweep, 'TRAIN', tmp_path / 'stand_in.py')


def started(out):
    return re.findall(r'^(.+): (?:train|evaluate), process', out, re.M)


def no_process(*args, **kwargs):
    raise AssertionError(f'started {args}')

# ----------------------------------------------------------------------------------------------------------------------
# a study, trained

def test_a_study_killed_and_continued(world, monkeypatch):
    cells = {'misfit': dict(n_embd=32, init_from='cell:standard'),
             'warm': dict(coupling='alternating', init_from='cell:standard', max_iters=3),
             'standard': dict(max_iters=300, eval_interval=20)}
    world.write(cells, comparisons=[('standard', 'warm')], tasks='ppl', measure='ppl.perplexity_per_token')
    study = load(str(world.path), 'cpu', f'{world.tmp}/out')
    assert [run.cell for run in study.runs] == ['standard', 'misfit', 'warm']
    standard, misfit, warm = study.runs

    # the sweep is killed, and leaves its training behind
    command = [sys.executable, sweep.__file__, str(world.path), f'--out={world.tmp}/out']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid = int(next(m for line in process.stdout if (m := re.search(r'standard seed 1: train, process (\d+)', line)))[1])
    try:
        while not any(r['step'] >= 2 for r in read_metrics(standard.folder)):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait()
        os.kill(pid, signal.SIGSTOP)  # so that it is still there, however slow this is
        assert f'process id {process.pid}' in world.refused()
    finally:
        os.kill(pid, signal.SIGKILL)
        process.stdout.close()
    with open(study.folder / 'sweep.lock') as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # once it has gone
    assert not sweep.is_trained(standard, 300)

    # one of three cannot work
    status, out = world.run()
    assert status == 1 and started(out) == ['standard seed 1', 'standard seed 1', 'misfit seed 1', 'warm seed 1', 'warm seed 1']
    assert 'resuming' in (standard.folder / 'log.txt').read_text()
    assert 'misfit seed 1: FAILED: error: ' in out and 'does not fit the model' in out and str(misfit.folder / 'log.txt') in out
    assert '1 of 3 runs failed' in out and not list(misfit.folder.glob('*.pt'))
    losses = [[(r['step'], r['val_loss']) for r in read_metrics(run.folder) if 'val_loss' in r] for run in (standard, warm)]
    assert [step for step, _ in losses[0]] == list(range(0, 301, 20)) and [step for step, _ in losses[1]] == [0, 3]
    assert losses[1][0][1] == losses[0][-1][1]  # the coupling starts as the identity, on the weights of `standard`
    for run, step in (standard, 300), (warm, 3):
        document = json.loads((run.folder / 'evaluate.json').read_text())
        assert document['step'] == step and document['config']['split'] == 'test'
        assert 1 < document['results']['ppl']['perplexity_per_token']['value'] < 256  # better than even odds for all bytes

    # what is finished is left alone
    monkeypatch.setattr(sweep.subprocess, 'Popen', no_process)
    before = {p: p.read_bytes() for p in world.out.rglob('*') if p.is_file() and p.name != 'sweep.lock'}
    status, out = world.run('--cells=warm')
    assert status == 0 and 'all 2 runs are finished' in out and 'experiments/report.py' in out
    assert before == {p: p.read_bytes() for p in world.out.rglob('*') if p.is_file() and p.name != 'sweep.lock'}

# ----------------------------------------------------------------------------------------------------------------------
# the order, and what goes wrong; no training

CELLS = {'b/warm': dict(init_from='cell:c'), 'a': {}, 'c': dict(seeds=[1, 2, 5])}


def test_seed_by_seed_and_a_cell_after_its_start(world, stand_in):
    world.write(CELLS, seeds=[2, 1])
    status, out = world.run()
    assert status == 0
    assert started(out) == ['c seed 2', 'b/warm seed 2', 'a seed 2', 'c seed 1', 'b/warm seed 1', 'a seed 1', 'c seed 5']
    flags = (world.out / 'made/cpu/b/warm/seed_1/log.txt').read_text().split()
    assert f'--init_from={world.out}/made/cpu/c/seed_1/last.pt' in flags and '--overwrite=True' in flags
    assert started(world.run()[1]) == []


def test_two_at_a_time(world, stand_in, monkeypatch):
    monkeypatch.setattr(sweep, 'CORES', 4)
    monkeypatch.delenv('OMP_NUM_THREADS')
    world.write(CELLS, seeds=[2, 1])
    status, out = world.run('--jobs=2')
    running = [0]
    for line in out.splitlines()[1:]:
        running.append(running[-1] + ('train, process' in line) - ('finished;' in line))
    assert status == 0 and len(started(out)) == 7 and max(running) == 2 and running[-1] == 0
    for seed in 1, 2:
        assert out.index(f'c seed {seed}: finished') < out.index(f'b/warm seed {seed}: train')
    assert 'at work 2\n' in (world.out / 'made/cpu/a/seed_1/log.txt').read_text()  # threads: four cores, two jobs


def test_a_failure_stops_only_what_needs_it(world, stand_in):
    world.write({'bad': dict(prompt='fail'), 'after': dict(init_from='cell:bad'), 'unsaved': dict(prompt='unsaved'), 'good': {}},
                seeds=[1, 2])
    (world.out / 'made/cpu/unsaved/seed_1').mkdir(parents=True)
    (world.out / 'made/cpu/unsaved/seed_1/last.pt').touch()  # older than the metrics.jsonl to come: the last save is missing
    os.utime(world.out / 'made/cpu/unsaved/seed_1/last.pt', (1e9, 1e9))
    status, out = world.run('--seeds=1')
    assert status == 1 and '3 of 4 runs failed' in out
    assert 'bad seed 1: error: no luck\n  log: ' in out and 'after seed 1: not run: bad seed 1' in out
    assert 'unsaved seed 1: train ended without its results' in out and 'good seed 1: finished' in out
    assert not (world.out / 'made/cpu/bad/seed_2').exists()
    assert started(world.run('--cells=good')[1]) == ['good seed 2']


def test_stopped(world, stand_in):
    world.write({'one': dict(prompt='wait'), 'two': {}})
    handler = signal.getsignal(signal.SIGTERM)
    status, out = world.run()
    assert status == 128 + signal.SIGTERM and started(out) == ['one seed 1'] and (world.out / 'made/cpu/one/seed_1/told').exists()
    assert f'to go on: python experiments/sweep.py {world.path}' in out and signal.getsignal(signal.SIGTERM) == handler


def test_another_run_in_the_folder(world, stand_in):
    world.write({'a': {}}, seeds=[1])
    assert world.run()[0] == 0
    world.write({'a': dict(learning_rate=0.5)})
    assert 'learning_rate: 0.0006 in the folder, 0.5 in the study' in world.refused()
    world.write({'a': dict(init_from='cell:b'), 'b': {}})
    assert "init_from: 'auto' in the folder" in world.refused()
    world.write({'a': dict(log_interval=1)})  # not another run
    assert started(world.run()[1]) == []


def test_a_run_is_finished_when_its_last_save_is(world, tmp_path):
    run, log, last = SimpleNamespace(folder=tmp_path), tmp_path / 'metrics.jsonl', tmp_path / 'last.pt'
    lines = [dict(step=0, config={}), dict(step=0, val_loss=5.0), dict(step=6, loss=3.0, tok_s=9.0), dict(step=6, val_loss=3.0)]
    def write(lines, end=''):
        log.write_text('\n'.join(map(json.dumps, lines)) + '\n' + end)
        os.utime(log, (1000, 1000))
    assert not sweep.is_trained(run, 6)  # no run
    write(lines[:3])
    assert not sweep.is_trained(run, 6)  # not evaluated
    write(lines, '{"step": 6, "val_l')
    assert sweep.is_trained(run, 6) and not sweep.is_trained(run, 7)  # weights removed
    last.touch()
    os.utime(last, (1001, 1001))
    assert sweep.is_trained(run, 6)
    os.utime(last, (999, 999))
    assert not sweep.is_trained(run, 6)  # killed between the evaluation and the save
    write(lines + [dict(step=6, config={})])
    assert sweep.is_trained(run, 6)      # resumed at 6, from the file then

    scores = tmp_path / 'evaluate.json'
    assert sweep.scored_tasks(run, 6) == []
    scores.write_text(json.dumps(dict(step=6, results=dict(ppl={}, mqar={}))))
    assert sweep.scored_tasks(run, 6) == ['ppl', 'mqar'] and sweep.scored_tasks(run, 9) == []
    os.utime(scores, (998, 998))
    assert sweep.scored_tasks(run, 6) == []  # of an earlier last.pt


def test_scores_of_another_study_are_kept(world, stand_in):
    world.write({'a': {}})
    world.run()
    folder = world.out / 'made/cpu/a/seed_1'
    (folder / 'evaluate.json').write_text(json.dumps(dict(step=6, results=dict(ppl={}))))
    world.write(['a'], name='other', runs_of='made', tasks='mqar', measure='mqar')
    text = world.path.read_text()
    world.path.write_text('\n'.join(line for line in text.splitlines() if not line.startswith('scales')))
    study = load(str(world.path), 'cpu', str(world.out))
    kind, command = sweep.next_process(study, study.runs[0], 1)
    assert kind == 'evaluate' and '--tasks=ppl,mqar' in command and f'--json={folder}/evaluate.json' in command
    (folder / 'evaluate.json').write_text(json.dumps(dict(step=6, results=dict(ppl={}, mqar={}))))
    assert world.run()[0] == 0 and not (world.out / 'other').exists()


def test_time_left_by_hand(world):
    world.write({'a': {}, 'b': dict(batch_size=8)}, seeds=[1, 2])
    study = load(str(world.path), 'cpu', str(world.out))
    assert sweep.remaining_seconds(study, study.runs, 1) is None
    def write(cell, *records):
        folder = world.out / f'made/cpu/{cell}/seed_1'
        folder.mkdir(parents=True)
        (folder / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, records)))
    # a: 4 x 32 = 128 tokens an update, at 64 tokens/s (the median) 2 s. Seed 1 has 2 of 6 updates to go, seed 2 all: 16 s
    write('a', *(dict(step=s, tok_s=t) for s, t in ((2, 64.0), (3, 1.0), (4, 90.0))))
    # b, unknown yet, is taken to be as fast: 12 updates, 24 s
    assert sweep.remaining_seconds(study, study.runs, 1) == pytest.approx(40)
    # b: 8 x 32 = 256 tokens at 64 tokens/s are 4 s; 0 + 6 updates, 24 s. With two jobs half of all
    write('b', dict(step=6, tok_s=64.0))
    assert sweep.remaining_seconds(study, study.runs, 2) == pytest.approx((16 + 24) / 2)


def test_processes_share_cores_and_gpus(monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setattr(sweep, 'CORES', 16)
    assert 'CUDA_VISIBLE_DEVICES' not in sweep.environment(0, 1, 8, 8)
    assert [sweep.environment(slot, 3, 2, 8)['CUDA_VISIBLE_DEVICES'] for slot in range(3)] == ['0,1', '2,3', '4,5']
    assert sweep.environment(0, 4, 2, 0)['OMP_NUM_THREADS'] == '2' and sweep.environment(0, 16, 2, 0)['OMP_NUM_THREADS'] == '1'
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '5,7')
    monkeypatch.setenv('OMP_NUM_THREADS', '3')
    env = sweep.environment(1, 2, 1, 2)
    assert env['CUDA_VISIBLE_DEVICES'] == '7' and env['OMP_NUM_THREADS'] == '3'


def test_several_processes_a_run(world):
    world.write({'a': {}})
    study = load(str(world.path), 'cpu', str(world.out))
    command = sweep.next_process(study, study.runs[0], 4)[1]
    assert command[1:6] == ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=4', str(sweep.TRAIN)]


def test_a_dry_run_does_nothing(world, monkeypatch):
    monkeypatch.setattr(sweep.subprocess, 'Popen', no_process)
    world.write({'a': {}, 'b': dict(init_from='cell:a')})
    status, out = world.run('--dry_run')
    assert status == 0 and out.startswith('A study of the tests.\n') and not world.out.exists()
    assert re.search(r'^a seed 1: train: .*train\.py .*--seed=1', out, re.M) and out.index('a seed 1') < out.index('b seed 1')


def test_one_sweep_at_a_time(world, monkeypatch):
    monkeypatch.setattr(sweep.subprocess, 'Popen', no_process)
    world.write({'a': {}})
    study = load(str(world.path), 'cpu', str(world.out))
    held = sweep.lock(study)
    assert f'process id {os.getpid()}' in world.refused()
    fcntl.flock(held, fcntl.LOCK_UN)
    with pytest.raises(AssertionError, match='started'):  # now it would run
        world.run()

# ----------------------------------------------------------------------------------------------------------------------
# mistakes

@pytest.mark.parametrize('flags, words', [
    (['--jobs=0'], ['--jobs=0', 'at least 1']),
    (['--jobs=100000'], ['--jobs=100000', 'CPU cores']),
    (['--nproc_per_node=2'], ['gradient_accumulation_steps = 1', 'multiple of 2']),
    (['--seeds=1,9'], ['--seeds=1,9', "'9'", 'it has 1,2']),
    (['--cells=a,c'], ['--cells=a,c', "'c'", 'it has a,b']),
    (['--scale=gpu'], ["'gpu'", '--scale=cpu']),
    (['--job=2'], ["'job'", "'jobs'"]),
    (['elsewhere.py'], ['2 studies']),
])
def test_wrong_flags(world, monkeypatch, flags, words):
    monkeypatch.setattr(sweep, 'CORES', 2)
    world.write({'a': {}, 'b': {}}, seeds=[1, 2])
    message = world.refused(*flags)
    assert all(word in message for word in words), message
    assert not world.out.exists()


@pytest.mark.parametrize('cells, more, words', [
    ({'a': dict(n_layers=2)}, {}, ["cell 'a'", "'n_layers'", "'n_layer'"]),
    ({'a': dict(n_layer='two')}, {}, ["cell 'a'", 'n_layer', 'an integer']),
    ({'a': dict(n_head=3)}, {}, ["cell 'a'", 'n_embd=16', 'n_head=3']),
    ({'a': dict(coupling='alternate')}, {}, ["cell 'a'", "'alternate'", 'alternating']),
    ({'a': dict(batch_size=0)}, {}, ["cell 'a'", 'batch_size = 0', 'at least 1']),
    ({'a': dict(seed=3)}, {}, ["cell 'a'", 'seed is set by sweep.py']),
    ({'a': dict(seeds=[])}, {}, ["cell 'a'", 'seeds = []']),
    ({'a': dict(seeds=[1, 1])}, {}, ["cell 'a'", 'seeds = [1, 1]']),
    ({'a': 3}, {}, ["cell 'a'", 'dict']),
    ({'../a': {}}, {}, ["cell '../a'", 'letters']),
    ({'a': dict(init_from='b.pt')}, {}, ["cell 'a'", 'b.pt', 'cell:NAME']),
    ({'a': dict(init_from='cell:b')}, {}, ["cell 'a'", 'cell:b', 'no such cell']),
    ({'a': dict(init_from='cell:b'), 'b': dict(init_from='cell:a')}, {}, ['circle']),
    ({'a': dict(init_from='cell:b', seeds=[1, 2]), 'b': {}}, {}, ["cell 'a'", 'b has no seed [2]']),
    ({}, {}, ['no cells']),
    ({'a': {}}, dict(comparison=[]), ["'comparison'", "'comparisons'"]),
    ({'a': {}}, dict(comparisons=[('a', 'b')]), ["('a', 'b')", 'base, treatment']),
    ({'a': {}}, dict(published={'b': 1.0}), ["'b'", 'published']),
    ({'a': {}}, dict(published={'a': (1.0, 0.1, 3)}), ["'a'", '(mean, sample std)']),
    ({'a': {}}, dict(tasks='glue'), ["'glue'", 'lambada']),
    ({'a': {}}, dict(measure='mqar'), ["measure = 'mqar'", 'val_perplexity']),
    ({'a': {}}, dict(scales={}), ['scales is missing']),
    ({'a': {}}, dict(scales=dict(cpu=dict(configs='x'))), ["scale 'cpu'", "'configs'", "'config'"]),
    ({'a': {}}, dict(scales=dict(cpu=dict(seeds=[1]))), ['config is missing']),
    ({'a': {}}, dict(scales=dict(cpu=dict(config='config/none.py', seeds=[1]))), ['config/none.py']),
    ({'a': {}}, dict(scales=dict(cpu=dict(config='config/tiny.py'))), ['seeds = []']),
    ({'a': {}}, dict(runs_of='made'), ['scales and runs_of']),
    ({'a': dict(dataset='brwn')}, {}, ['data/brwn', 'python prepare.py']),
    ({'a': dict(dataset='r4')}, dict(corpora=dict(r4='mqar --out=r4')), ['data/r4', 'python prepare.py mqar --out=r4']),
])
def test_wrong_studies(world, monkeypatch, cells, more, words):
    monkeypatch.setattr(sweep.subprocess, 'Popen', no_process)
    world.write(cells, **more)
    message = world.refused()
    assert all(word in message for word in words), message
    assert not world.out.exists()


def test_no_such_study(tmp_path):
    with pytest.raises(ConfigError, match='(?s)cpu_studi.py: no such study.*experiments/studies/cpu_study.py'):
        load('experiments/studies/cpu_studi.py', 'cpu')
    (tmp_path / 'bare.py').write_text('cells = {}')
    with pytest.raises(ConfigError, match='scales is missing'):
        load(str(tmp_path / 'bare.py'), 'cpu')


def test_script_runs_from_any_folder():
    done = subprocess.run([sys.executable, sweep.__file__, '--sacle=cpu'], capture_output=True, text=True, cwd='/')
    assert done.returncode == 1 and done.stderr.startswith('error: ') and "'scale'" in done.stderr and done.stderr.count('\n') == 1

# ----------------------------------------------------------------------------------------------------------------------
# the studies

PUBLISHED = {  # typed from the tables: validation perplexity (mean, sample std), if nothing else is said
    'wikitext103_60m': {
        'standard': (24.20, 0.13), 'one_way': (24.04, 0.02), 'alternating': (23.92, 0.04), 'independent': (24.13, 0.03),
        'cross_mlp': (24.04, 0.07), 'linear_mix': (24.34, 0.05)},
    'wikitext103_150m': {
        'standard': (21.61, 0.03), 'one_way': (21.53, 0.05), 'alternating': (21.45, 0.06),
        'diff': (21.10, 0.08), 'diff+alternating': (20.92, 0.02), 'diff+simultaneous': (22.17, 0.04),
        'mta': (20.96, 0.05), 'mta+alternating': (20.85, 0.12), 'qk_norm': (22.25, 0.05), 'qk_norm+alternating': (21.96, 0.05)},
    'wikitext103_455m': {
        'standard': (19.56, 0.10), 'alternating': (19.48, 0.07), 'diff': (18.89, 0.04), 'diff+alternating': (18.79, 0.05),
        'diff+cross_mlp': (18.89, 0.11), 'diff+simultaneous': (18.78, 0.07),
        'mta': (19.24, 0.05), 'mta+alternating': (19.20, 0.03), 'qk_norm': (19.82, 0.02), 'qk_norm+alternating': (19.73, 0.08)},
    'wikitext103_455m_test': {  # test perplexity
        'standard': (21.79, 0.05), 'alternating': (21.76, 0.02), 'diff': (21.02, 0.04), 'diff+alternating': (20.88, 0.07)},
    'rope_1024': {'diff': (19.50, 0.03), 'diff+alternating': (19.20, 0.05)},
    # two seeds x and y: mean (x + y) / 2, sample std |x - y| / sqrt 2
    'fineweb_edu_60m': {'standard': (45.295, 0.09 / 2**0.5), 'alternating': (44.775, 0.23 / 2**0.5),
                        'diff': (45.125, 0.37 / 2**0.5), 'diff+alternating': (44.35, 0.30 / 2**0.5)},
    'zero_shot': {'standard': 0.259, 'alternating': 0.269, 'diff': 0.274, 'diff+alternating': 0.278},            # accuracy
    'zero_shot_hellaswag': {'standard': 0.313, 'alternating': 0.317, 'diff': 0.307, 'diff+alternating': 0.315},  # accuracy
    'mqar': {f'kv{kv}_len{length}/{cell}': accuracy for kv, length, *row in (                                    # accuracy
        (4, 64, 0.98, 1.00, 1.00, 1.00), (4, 128, 0.94, 1.00, 1.00, 1.00), (4, 256, 0.92, 0.99, 1.00, 1.00),
        (8, 64, 0.55, 0.18, 1.00, 1.00), (8, 128, 0.79, 0.72, 1.00, 1.00), (8, 256, 0.73, 0.51, 1.00, 1.00))
        for cell, accuracy in zip(('standard', 'alternating', 'diff', 'diff+alternating'), row)},
    'rope_60m': {'learned/standard': (24.20, 0.13), 'learned/alternating': (23.92, 0.04), 'rope/standard': (25.84, 0.07),
                 'rope/alternating': (24.00, 0.03)},
    'integrators_v1': dict(standard=(24.22, 0.12), mlp_only=(23.81, 0.31), euler=(22.55, 0.04), leapfrog=(22.62, 0.04)),
}
SCALES = [(path, scale) for path in STUDIES for scale in load(str(path), 'cpu').scales]


@pytest.mark.parametrize('path, scale', SCALES, ids=lambda x: getattr(x, 'stem', x))
def test_every_study_is_sound(path, scale, tmp_path):
    study = load(str(path), scale, tmp_path)
    assert study.title.startswith(('[v1], ', '[v2], ', 'Ours: ')) and len(study.comparisons) == len(set(study.comparisons))
    assert set(study.cells) == {run.cell for run in study.runs}
    folders = [run.folder for run in study.runs]
    assert len(set(folders)) == len(folders)
    for run in study.runs:
        settings = study.base | run.settings
        GPTConfig(**{f.name: settings[f.name] for f in fields(GPTConfig) if f.name in settings}).validate()
        assert run.settings['seed'] == run.seed and sweep.next_process(study, run, 1)[0] == 'train'
    # base and treatment differ in what is compared, not in data or optimizer, and share their seeds
    for pair in study.comparisons:
        differ = {key for key in study.base if len({(study.base | study.cells[cell])[key] for cell in pair}) > 1}
        assert differ and differ <= {'attention', 'coupling', 'coupling_rounds', 'n_kv_head'}, (pair, differ)
        base, treatment = ({run.seed for run in study.runs if run.cell == cell} for cell in pair)
        assert treatment <= base


@pytest.mark.parametrize('path', STUDIES, ids=lambda path: path.stem)
def test_published_figures(path):
    figures = PUBLISHED.get(path.stem, {})
    study = load(str(path), 'full' if figures else 'cpu')
    assert study.published.keys() == figures.keys()
    for cell, figure in figures.items():
        assert study.published[cell] == pytest.approx(figure), cell


@pytest.mark.parametrize('name, counts', [
    # 60,343,296 and what [v2] and [v1] add: 65,600, 198,656, 65,536, 262,144, 1,048,576
    ('wikitext103_60m', dict(standard=60_343_296, one_way=60_408_896, alternating=60_541_952, independent=60_408_832,
                             cross_mlp=60_605_440, linear_mix=61_391_872, gqa=57_197_568)),
    ('integrators_v1', dict(mlp_only=60_408_896, euler=60_408_896, leapfrog=60_408_896)),
    ('fineweb_edu_60m', dict(standard=60_343_296, diff=60_343_360)),
    ('rounds', dict(standard=60_343_296, rounds_1=60_541_952, rounds_2=60_740_608, rounds_3=60_939_264)),
    ('rope_60m', {'learned/standard': 60_343_296, 'rope/standard': 59_294_720}),  # without 2048 x 512 positions
    ('wikitext103_150m', dict(standard=153_435_648)),
    ('wikitext103_455m', dict(standard=456_263_680)),
])
def test_parameters(name, counts):
    study = load(f'experiments/studies/{name}.py', 'full')
    for cell, count in counts.items():
        settings = study.base | study.cells[cell]
        with torch.device('meta'):
            model = GPT(GPTConfig(**{f.name: settings[f.name] for f in fields(GPTConfig) if f.name in settings}))
        assert model.get_num_params() == count, cell


def test_what_the_tables_fix():
    full = lambda name: load(f'experiments/studies/{name}.py', 'full')
    names = {path.stem for path in STUDIES}
    assert set(PUBLISHED) < names and {'training_budget', 'rounds', 'warm_start', 'cpu_study'} < names
    assert [len(full(name).seeds) for name in ('wikitext103_60m', 'fineweb_edu_60m', 'mqar')] == [3, 2, 3]
    runs = [(run.cell, run.seed) for run in full('wikitext103_455m').runs]
    assert {cell for cell, seed in runs if seed == 6} == {'diff', 'diff+alternating'} and runs.count(('mta', 3)) == 1
    assert len(full('mqar').runs) == 6 * 4 * 3
    rope = full('rope_1024')
    assert (rope.base | rope.cells['diff'])['block_size'] == 1024 and (rope.base | rope.cells['diff'])['pos'] == 'rope'
    budget = full('training_budget')  # evaluated at 8K, 15K, 22K and 29K
    now = budget.base | budget.cells['diff']
    assert now['max_iters'] == 29000 and all(step % now['eval_interval'] == 0 for step in (8000, 15000, 22000, 29000))
    same = full('wikitext103_455m')
    assert {run.folder for run in budget.runs} < {run.folder for run in same.runs} and all(run in same.runs for run in budget.runs)
    warm = full('warm_start')
    assert warm.cells['continued'] == {k: v for k, v in warm.cells['warm'].items() if k != 'coupling'}
    study = load('experiments/studies/cpu_study.py', 'cpu')
    assert len(study.runs) == 2 * (4 * 5 + 2 * 3)
