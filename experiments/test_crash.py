"""
Kill, starve and fuzz train.py.

    python -m pytest -q experiments/test_crash.py                                # a few of each, about two minutes
    KILLS=50 FLAGS=300 FILES=100 python -m pytest -q -s experiments/test_crash.py  # the full count, about ten

SIGKILLs at random moments, flag sets and config files made by hypothesis (pip install hypothesis), torchrun's elastic
restart, a full disk. Every process that is killed was started here and is addressed by its id.
"""
import hashlib
import json
import os
import random
import re
import resource
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip('hypothesis')
from hypothesis import HealthCheck, example, given, settings, strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import prepare
import train
from configurator import ConfigError, configure

KILLS, FLAGS, FILES = (int(os.environ.get(k, n)) for k, n in dict(KILLS=3, FLAGS=40, FILES=20).items())
TRAIN = train.__file__
ENV = os.environ | {'OMP_NUM_THREADS': '1'}
TINY = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--n_pos=64', '--block_size=16', '--batch_size=2', '--device=cpu',
        '--gradient_accumulation_steps=2', '--warmup_iters=2', '--dropout=0.1', '--learning_rate=1e-2', '--min_lr=1e-3']


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data') / 'mini'
    folder.mkdir()
    rng, sizes = np.random.default_rng(0), dict(train=5000, val=200)
    for split, n in sizes.items():
        (rng.integers(0, 6, n).cumsum() % 64).astype(np.uint16).tofile(folder / f'{split}.bin')
    (folder / 'meta.json').write_text(json.dumps(dict(command='python prepare.py text', tokenizer='byte', vocab_size=256, dtype='uint16', tokens=sizes)))
    return folder


def command(corpus, out, *flags, ranks=0, restarts=0):
    launch = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}', f'--max-restarts={restarts}'] if ranks else []
    return [sys.executable, *launch, TRAIN, f'--dataset={corpus}', *TINY, f'--out_dir={out}', *flags]


def metrics(out):
    records = [json.loads(line) for line in open(f'{out}/metrics.jsonl')]
    return [{k: v for k, v in r.items() if k not in ('tok_s', 'tflops', 'mfu')} for r in records if 'config' not in r]


def weights(out):
    return torch.load(f'{out}/last.pt', weights_only=True)['model']


def assert_same_run(a, b):
    assert metrics(a) == metrics(b)
    x, y = weights(a), weights(b)
    assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(folder).iterdir()}


# ----------------------------------------------------------------------------------------------------------------------

def test_sigkill_at_random_moments(corpus, tmp_path):
    """KILLS times in a row: after each the run folder loads, and the run that got through equals the undisturbed one."""
    flags = ['--max_iters=3000', '--lr_decay_iters=3000', '--eval_interval=15', '--log_interval=7', '--keep=2']
    subprocess.run(command(corpus, tmp_path / 'straight', *flags), check=True, env=ENV, stdout=subprocess.DEVNULL)
    out, moments, saving, steps = tmp_path / 'killed', random.Random(0), 0, []
    for kill in range(KILLS):
        process = subprocess.Popen(command(corpus, out, *flags), env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in process.stdout:  # until training goes on: start-up is too long a part of such a run
            if line.startswith('step '):
                break
        else:
            raise AssertionError(f'kill {kill}: the run did not continue:\n{line}')
        time.sleep(moments.random() * 0.5)
        process.kill()
        process.communicate()
        saving += any(out.glob('*.tmp'))
        state, problem = train.read_checkpoint(str(out / 'last.pt')) if (out / 'last.pt').exists() else (None, None)
        assert problem is None, f'kill {kill}: {problem}'
        steps.append(state['iter_num'] if state else -1)
    assert steps == sorted(steps) and steps[-1] < 3000, steps
    subprocess.run(command(corpus, out, *flags), check=True, env=ENV, stdout=subprocess.DEVNULL)
    assert_same_run(tmp_path / 'straight', out)
    assert sorted(p.name for p in out.glob('*.tmp')) == []
    print(f'\n{KILLS} kills survived, {saving} of them inside a save; checkpoints at steps {steps}')


def test_sigkill_inside_the_save(corpus, tmp_path):
    """The process dies after every possible part of a save: before, within and between its files."""
    script = tmp_path / 'dies.py'
    script.write_text(f'''
import os, signal, sys
sys.path.insert(0, {str(Path(TRAIN).parent)!r})
import torch, train
where, n = sys.argv[1], int(sys.argv[2])
calls = [0]
def deadly(function, half=False):
    def f(*args, **kwargs):
        calls[0] += 1
        if calls[0] == n:
            if half:
                args[1].write(b'PK' * 1000); args[1].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return f
if where == 'write':
    torch.save = deadly(torch.save, half=True)
elif where == 'fsync':
    os.fsync = deadly(os.fsync)
else:
    os.replace = deadly(os.replace)
train.main(sys.argv[3:])
''')
    flags = ['--max_iters=6', '--eval_interval=2', '--log_interval=1', '--keep=1']
    subprocess.run(command(corpus, tmp_path / 'straight', *flags), check=True, env=ENV, stdout=subprocess.DEVNULL)
    for where, n in [('write', 1), ('write', 2), ('write', 3), ('fsync', 3), ('replace', 1), ('replace', 2), ('replace', 3), ('replace', 5)]:
        out = tmp_path / f'{where}{n}'
        argv = command(corpus, out, *flags)
        died = subprocess.run([sys.executable, str(script), where, str(n), *argv[2:]], env=ENV, capture_output=True, text=True)
        assert died.returncode == -signal.SIGKILL, died.stderr
        subprocess.run(argv, check=True, env=ENV, stdout=subprocess.DEVNULL)
        assert_same_run(tmp_path / 'straight', out)


def children(pid):
    """Process ids of the workers that torchrun started."""
    found = []
    for stat in Path('/proc').glob('[0-9]*/stat'):
        try:
            text = stat.read_text()
        except OSError:
            continue
        if int(text.rpartition(')')[2].split()[1]) == pid:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path('/proc').exists(), reason='finds the ranks in /proc')
def test_elastic_restart(corpus, tmp_path):
    """torchrun --max-restarts=3, one rank killed three times: finished, with the losses of the undisturbed run."""
    flags = ['--max_iters=1500', '--lr_decay_iters=1500', '--eval_interval=50', '--log_interval=20']
    subprocess.run(command(corpus, tmp_path / 'straight', *flags, ranks=2), check=True, env=ENV, capture_output=True)
    out = tmp_path / 'killed'
    with open(tmp_path / 'log', 'w') as log:
        process = subprocess.Popen(command(corpus, out, *flags, ranks=2, restarts=3), env=ENV, stdout=log, stderr=log)
    killed = 0
    while process.poll() is None and killed < 3:
        done = [r['step'] for r in metrics(out)] if (out / 'metrics.jsonl').exists() else []
        if (tmp_path / 'log').read_text().count('tokens an update') == killed + 1 and max(done, default=0) >= 200 * (killed + 1):
            os.kill(children(process.pid)[killed % 2], signal.SIGKILL)
            killed += 1
        time.sleep(0.05)
    assert process.wait(timeout=300) == 0, (tmp_path / 'log').read_text()
    assert killed == 3 and (tmp_path / 'log').read_text().count('resuming') == 3
    assert_same_run(tmp_path / 'straight', out)


@pytest.mark.parametrize('signalled', ['torchrun', 'one rank'])
def test_sigterm_under_torchrun(corpus, tmp_path, signalled):
    flags = ['--max_iters=100000', '--eval_interval=100000', '--log_interval=10']
    process = subprocess.Popen(command(corpus, tmp_path / 'out', *flags, ranks=2), env=ENV, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
    for line in process.stdout:
        if line.startswith('step 20:'):
            break
    began = time.time()
    os.kill(process.pid if signalled == 'torchrun' else children(process.pid)[1], signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait() != 0 and time.time() - began < 20
    step = int(re.search(r'stopped by SIGTERM at step (\d+)', rest)[1])
    assert train.load_checkpoint(str(tmp_path / 'out' / 'last.pt'))['iter_num'] == step


def test_disk_full(corpus, tmp_path):
    """Files may not grow beyond 60% of a checkpoint: the save fails midway as on a full disk, the old checkpoint stays."""
    out = tmp_path / 'out'
    subprocess.run(command(corpus, out, '--max_iters=4'), check=True, env=ENV, stdout=subprocess.DEVNULL)
    before, size = digests(out), (out / 'last.pt').stat().st_size
    got = subprocess.run(command(corpus, out, '--max_iters=9', '--eval_interval=5'), env=ENV, capture_output=True, text=True,
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size * 6 // 10,) * 2))
    assert got.returncode == 1 and re.search(r'error: cannot write .*(best|last)\.pt: .*too large', got.stderr), got.stderr
    assert 'Traceback' not in got.stderr
    after = digests(out)
    assert after['last.pt'] == before['last.pt'] and after['best.pt'] == before['best.pt'] and not list(out.glob('*.tmp'))
    subprocess.run(command(corpus, out, '--max_iters=9', '--eval_interval=5'), check=True, env=ENV, stdout=subprocess.DEVNULL)
    assert train.load_checkpoint(str(out / 'last.pt'))['iter_num'] == 9


@pytest.mark.skipif(os.geteuid() != 0, reason='mounting needs root')
def test_disk_full_on_a_small_mount(corpus, tmp_path):
    subprocess.run(command(corpus, tmp_path / 'probe', '--max_iters=2', '--eval_interval=1'), check=True, env=ENV, stdout=subprocess.DEVNULL)
    size = (tmp_path / 'probe' / 'last.pt').stat().st_size
    mount = tmp_path / 'mount'
    mount.mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size * 3 // 2}', 'tmpfs', mount], capture_output=True).returncode:
        pytest.skip('mounting is not allowed here')
    try:  # room for last.pt of step 0, not for a second file
        got = subprocess.run(command(corpus, mount / 'out', '--max_iters=2', '--eval_interval=1'), env=ENV, capture_output=True, text=True)
        assert got.returncode == 1 and 'No space left on device' in got.stderr and 'Traceback' not in got.stderr
        assert train.load_checkpoint(str(mount / 'out' / 'last.pt'))['iter_num'] == 0
    finally:
        subprocess.run(['umount', mount], check=True)


# ----------------------------------------------------------------------------------------------------------------------
# fuzz, in this process

counts = dict(trained=0, refused=0)


@pytest.fixture(scope='module')
def existing(corpus, tmp_path_factory):
    """A finished run that nothing may touch."""
    out = tmp_path_factory.mktemp('runs') / 'existing'
    train.main([f'--dataset={corpus}', *TINY, f'--out_dir={out}', '--max_iters=2', '--eval_interval=1'])
    return out


def attempt(argv, capsys):
    """Run train.py; it either refuses with a message or trains with exactly the settings it printed."""
    capsys.readouterr()
    try:
        train.main(argv)
        outcome = 'trained'
    except (SystemExit, ConfigError, prepare.DataError) as e:
        code = e.code if isinstance(e, SystemExit) else f'error: {e}'
        if code == 0 and {'-h', '--help'} & set(argv):
            return
        assert isinstance(code, str) and code.startswith('error: ') and len(code) > 15, (argv, code)
        outcome = 'refused'
    except Exception as e:  # an error that the command line turns into a message is one too
        assert train.explain(e), (argv, repr(e))
        outcome = 'refused'
    counts[outcome] += 1
    out = capsys.readouterr().out
    if outcome == 'trained':
        printed = dict(re.findall(r"(\w+)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\S+)", out.split(' parameters, ')[0]))
        want = configure(train.defaults, argv)
        for key, value in want.items():
            assert re.sub(r'\s+', ' ', printed[key]) == re.sub(r'\s+', ' ', repr(value)), (key, printed[key], value)
        if not want['eval_only']:
            state = train.load_checkpoint(os.path.join(want['out_dir'], 'last.pt'))
            assert state['config'] == want and state['iter_num'] == want['max_iters']


KEYS = sorted(train.defaults)
SMALL = st.one_of(st.integers(-2, 5), st.sampled_from([8, 16, 17, 64]))  # what is accepted is trained: keep it small
TEXTS = st.text(string.printable, max_size=8)
WORDS = st.sampled_from(['True', 'false', 'auto', 'none', 'scratch', 'resume', 'rope', 'diff', 'mta', 'alternating', 'one_way', 'cpu',
                         'float32', 'bfloat16', 'float16', '', 'nan', 'inf', '-inf', '1e3x', '0.5', '1e-3', '1.0', '2.5', '[]', 'None', '../x'])
VALUES = st.one_of(SMALL.map(str), WORDS, TEXTS)
# what could train for hours, load torch.compile's backend or write elsewhere is left to the tests by name
WILD = [k for k in KEYS if k not in ('out_dir', 'dataset', 'compile', 'max_iters', 'wandb_log', 'overwrite', 'prompt')]
GOOD = st.sampled_from('n_layer=2 n_head=4 n_head=1 n_kv_head=1 n_embd=24 n_embd=32 d_ff=8 dropout=0 dropout=0.5 pos=rope n_pos=16 '
                       'attention=diff attention=mta qk_norm qk_norm=true coupling=alternating coupling=linear_mix coupling=leapfrog '
                       'coupling_rounds=2 flash=False seed=0 seed=9e9 learning_rate=1 weight_decay=0 beta1=0 grad_clip=0 decay_lr=false '
                       'warmup_iters=0 lr_decay_iters=0 min_lr=0 dtype=bfloat16 dtype=float16 loss_chunk=7 block_size=9 batch_size=1 '
                       'gradient_accumulation_steps=3.0 eval_interval=1 eval_iters=1 eval_only log_interval=1 keep=1 device=auto '
                       'init_from=scratch backend=gloo'.split()).map('--{}'.format)
FLAG = st.one_of(GOOD, st.tuples(st.sampled_from(WILD), VALUES).map('--{0[0]}={0[1]}'.format), st.sampled_from(WILD).map('--{}'.format),
                 TEXTS, TEXTS.map('--{}'.format),
                 st.tuples(st.sampled_from(WILD), st.integers(0, 9)).map(lambda t: f'--{t[0][:t[1]]}x{t[0][t[1]:]}=1'))
FUZZ = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)


@settings(max_examples=FLAGS, **FUZZ)
@given(flags=st.lists(GOOD, max_size=6) | st.lists(FLAG, max_size=4), number=st.integers(0, 10**9), onto_existing=st.booleans())
@example(flags=['--help'], number=0, onto_existing=False)
def test_fuzz_flags(corpus, existing, tmp_path_factory, capsys, flags, number, onto_existing):
    before = digests(existing)
    out = existing if onto_existing else tmp_path_factory.mktemp('fuzz') / str(number)
    base = [f'--dataset={corpus}', *TINY, f'--out_dir={out}', '--max_iters=2']
    attempt([*base, *flags, '--init_from=scratch'] if onto_existing else [*base, *flags], capsys)
    assert digests(existing) == before


SOUND = st.sampled_from(['n_layer = 2', 'n_head = 2 * 2', '_d = 8\nn_embd = 4 * _d', 'import math\nd_ff = math.gcd(64, 24)', 'pos = "rope"',
                         'attention = "diff"', 'coupling = "one_way"', 'qk_norm = True', 'dropout = 0', 'seed = 1e3', 'keep = 2',
                         'eval_only = True', 'batch_size = 1', 'flash = False'])
PYTHON = st.one_of(
    SOUND,
    st.tuples(st.sampled_from(WILD), st.one_of(SMALL.map(repr), WORDS.map(repr), TEXTS.map(repr),
              st.sampled_from(['1e3', 'True', 'None', '[]', '1/0', '2**70', '10**5000', '_x', 'math.pi', '1e400', 'lambda: 0']))).map('{0[0]} = {0[1]}'.format),
    st.sampled_from(['import math', '_x = 1', 'x = 1', '# a comment', 'if True:', ' n_head = 2', 'raise ValueError("no")', 'exit()',
                     'def f(): pass', 'from math import pi', 'max_iter = 5', 'n_layer == 1', 'del n_layer', 'assert False', '\0', '"""']),
    TEXTS)


@settings(max_examples=FILES, **FUZZ)
@given(lines=st.lists(SOUND, max_size=5) | st.lists(PYTHON, max_size=4), number=st.integers(0, 10**9))
def test_fuzz_config_files(corpus, existing, tmp_path_factory, capsys, lines, number):
    before, folder = digests(existing), tmp_path_factory.mktemp('fuzz')
    file = folder / 'config.py'
    file.write_text('\n'.join(lines))
    attempt([f'--dataset={corpus}', *TINY, str(file), f'--out_dir={folder}/{number}', '--max_iters=2'], capsys)
    assert digests(existing) == before


def test_fuzz_count():
    print(f'\nfuzzed: {counts}')
    assert min(counts.values()) > (FLAGS + FILES) // 10
