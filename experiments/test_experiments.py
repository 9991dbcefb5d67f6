"""
Tests of the scripts in this folder: python -m pytest -q experiments

The answers come from hand-set models whose probabilities are written here, from formulas in the comments, and, where it
is installed, from lm-evaluation-harness.
"""
import importlib.util
import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import compare
import evaluate
import prepare
import sample
import train
from model import GPT, GPTConfig

torch.set_num_threads(1)

# ----------------------------------------------------------------------------------------------------------------------
# hand-set models with the signature of GPT

class HandSet(nn.Module):
    def __init__(self, block_size, vocab_size=256):
        super().__init__()
        self.config = SimpleNamespace(block_size=block_size, vocab_size=vocab_size, attention='hand-set', coupling='none')

    def get_num_params(self):
        return 0

    def forward(self, idx, targets=None, loss_chunk=0):
        assert idx.size(1) <= self.config.block_size
        logits = self.log_probs(idx)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Bigram(HandSet):
    """p(next | byte) from a dict: {'a': {'b': 1/2}} and the rest of the probability evenly on all other bytes."""
    def __init__(self, table, block_size=64):
        super().__init__(block_size)
        p = torch.full((256, 256), 1 / 256)
        for current, following in table.items():
            p[ord(current)] = (1 - sum(following.values())) / (256 - len(following))
            for byte, value in following.items():
                p[ord(current), ord(byte)] = value
        self.table = p.log()

    def log_probs(self, idx):
        return self.table[idx]


class Patient(HandSet):
    """p('a') = (t+1)/(t+2) at window position t = 0, 1, ...: whatever the text, trust in 'a' grows with the context.

    Over positions s..e the probabilities multiply to (s+1)/(e+2), so every window's score is known in closed form.
    """
    def log_probs(self, idx):
        t = torch.arange(idx.size(1), dtype=torch.float64)
        p = ((1 - (t + 1) / (t + 2)) / 255).repeat(idx.size(0), 256, 1).transpose(1, 2).clone()
        p[:, :, ord('a')] = (t + 1) / (t + 2)
        return p.log()


BYTES = {'name': 'byte'}

@pytest.fixture
def world(tmp_path, monkeypatch, capsys):
    """evaluate(model, argv, data=...) -> (JSON document of the last line, table). Data live in a folder of the test."""
    monkeypatch.setattr(prepare, 'DATA_DIR', tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(model, *argv, tokenizer=BYTES, trained_on='toy'):
        state = dict(tokenizer=tokenizer, data=dict(name=trained_on, sha256={}), iter_num=0, model_args={},
                     config=dict(batch_size=4, seed=0))
        monkeypatch.setattr(evaluate, 'load', lambda path, device: (model, state))
        evaluate.main(['--device=cpu', *argv])
        lines = capsys.readouterr().out.splitlines()
        return json.loads(lines[-1]), lines[:-1]

    run.folder = tmp_path
    return run


def write_corpus(folder, text, name='toy'):
    path = folder / name
    path.mkdir()
    meta = dict(tokenizer='byte', vocab_size=256, dtype='uint16', command='-', tokens={})
    for split in 'train', 'val', 'test':
        ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)
        ids.tofile(path / f'{split}.bin')
        meta['tokens'][split] = len(ids)
    (path / 'meta.json').write_text(json.dumps(meta))


def prepare_rows(folder, name, rows):
    """What prepare.py writes from a local copy of the evaluation set."""
    source = folder / f'{name}_source' / {'lambada': 'test.jsonl', 'hellaswag': 'validation.jsonl'}[name]
    source.parent.mkdir()
    source.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    prepare.prepare(name, path=str(source), data_dir=str(folder))


def fails(capsys_or_call, *argv):
    with pytest.raises((SystemExit, prepare.DataError)) as e:
        capsys_or_call(*argv)
    return str(e.value)

# ----------------------------------------------------------------------------------------------------------------------
# perplexity

def test_perplexity_of_a_bigram_by_hand(world):
    # 'ab' 50 times: a -> b 50 times at 1/2, b -> a 49 times at 1/4: 50 ln 2 + 49 ln 4 = 148 ln 2 over 99 tokens
    write_corpus(world.folder, 'ab' * 50)
    model = Bigram({'a': {'b': 1 / 2}, 'b': {'a': 1 / 4}}, block_size=16)
    for stride in 0, 1, 5, 16:
        got = world(model, '--ckpt=x', f'--stride={stride}')[0]['results']['ppl']
        assert got['nats_per_token']['n'] == 99
        assert got['nats_per_token']['value'] == pytest.approx(148 * math.log(2) / 99, rel=1e-6)
        assert got['perplexity_per_token']['value'] == pytest.approx(2 ** (148 / 99), rel=1e-6)
        assert got['bits_per_byte']['value'] == pytest.approx(148 / 99, rel=1e-6)
        assert got['perplexity_per_word']['value'] == pytest.approx(2 ** 148, rel=1e-4)  # one word


def test_windows_and_stride_in_closed_form(world):
    # 101 a's, block 16: 100 targets. Apart: 6 windows of ln 17 and a tail of 4, ln 5.
    # Stride 6: a window of ln 17, 14 of its last 6 positions 10..15, ln(17/11): 16 + 14 * 6 = 100.
    # Stride 7: 16 + 12 * 7 = 100: ln(17/10) each. Stride 9: 16 + 9 * 9 = 97, and 3 in a last window, ln(17/14).
    write_corpus(world.folder, 'a' * 101)
    expected = {0: 6 * math.log(17) + math.log(5), 6: math.log(17) + 14 * math.log(17 / 11),
                7: math.log(17) + 12 * math.log(17 / 10), 9: math.log(17) + 9 * math.log(17 / 8) + math.log(17 / 14)}
    for stride, nll in expected.items():
        got = world(Patient(16), '--ckpt=x', f'--stride={stride}')[0]['results']['ppl']['nats_per_token']
        assert got['n'] == 100 and got['value'] == pytest.approx(nll / 100, rel=1e-6), stride


def test_standard_error_of_the_loss(world):
    # windows of 2: 'aa' ln 2 + ln(3/2) = ln 3 a window; the ends: a tail of one token, ln 2. Ratio estimator by hand:
    write_corpus(world.folder, 'a' * 6)
    got = world(Patient(2), '--ckpt=x')[0]['results']['ppl']['nats_per_token']
    mean = (2 * math.log(3) + math.log(2)) / 5
    residuals = [math.log(3) - 2 * mean, math.log(3) - 2 * mean, math.log(2) - mean]
    assert got['value'] == pytest.approx(mean, rel=1e-6)
    assert got['se'] == pytest.approx(math.sqrt(3 / 2 * sum(r * r for r in residuals)) / 5, rel=1e-5)


def test_bytes_and_words():
    byte = prepare.tokenizer_from_state(BYTES)
    assert evaluate.text_size(byte, np.frombuffer('né  d\nw'.encode(), np.uint8)) == (8, 3)
    ranks = {bytes([i]): i for i in range(256)}
    bpe = prepare.tiktoken.Encoding('t', pat_str=r'[\s\S]', mergeable_ranks=ranks, special_tokens={prepare.END: 256})
    ids = np.array([*b'one', 256, *b'two three', 256])  # the end of text is no byte and no part of a word
    assert evaluate.text_size(bpe, ids) == (12, 3)

# ----------------------------------------------------------------------------------------------------------------------
# LAMBADA and HellaSwag

def test_lambada_by_hand(world):
    # argmax chain: e -> ' ', ' ' -> c, c -> a, a -> t, h -> a. Scored as ' ' + last word after the text before it.
    chain = Bigram({'e': {' ': .5}, ' ': {'c': .5}, 'c': {'a': .5}, 'a': {'t': .5}, 'h': {'a': .5}})
    rows = [dict(text=t) for t in ('see the cat',   # both right
                                   'see the hat',   # ' ' -> h is wrong, a -> t right
                                   'see the cab',   # a -> b wrong
                                   'see a cat')]    # a -> ' ' is wrong, the last token right
    prepare_rows(world.folder, 'lambada', rows)
    document, table = world(chain, '--ckpt=x', '--tasks=lambada', '--limit=0', '--json=out.json')
    got = document['results']['lambada']
    assert got['last_token'] == dict(value=0.75, se=pytest.approx(math.sqrt(0.75 * 0.25 / 3)), n=4)
    assert got['last_word'] == dict(value=0.25, se=pytest.approx(math.sqrt(0.75 * 0.25 / 3)), n=4)
    saved = json.loads((world.folder / 'out.json').read_text())
    assert saved['results'] == document['results']
    assert saved['examples']['lambada']['values'] == dict(last_token=[1, 1, 0, 1], last_word=[1, 0, 0, 0])
    assert saved['examples']['lambada']['indices'] == [0, 1, 2, 3]
    assert any('last_word' in line and '0.2500 ± 0.2500' in line for line in table)


def test_hellaswag_by_hand(world):
    # bits: é is two bytes and costs 1 + 0, a 2, space 3, b 3, after whatever. Endings with their space:
    #   'é'        4 bits, 3 tokens, 1 character:  sum 4     a token 1.33  a character 4
    #   'éé'       5 bits, 5 tokens, 2 characters: sum 5     a token 1.00  a character 2.5
    #   'aaaaaaaa' 19 bits, 9 tokens, 8:           sum 19    a token 2.11  a character 2.375
    #   'b'        6 bits, 2 tokens, 1:            sum 6     a token 3     a character 6
    row = {'\xc3': 1 / 2, 'a': 1 / 4, ' ': 1 / 8, 'b': 1 / 8 - 1e-9}
    table = {chr(i): row for i in range(256)} | {'\xc3': {'\xa9': 1 - 1e-9}}
    rows = [dict(ind=i, activity_label='x', ctx_a='y', ctx_b='z', endings=['é', 'éé', ' aaaaaaaa', 'b [step]'[:1]],
                 label=str(label)) for i, label in enumerate([0, 0, 0, 1, 1, 2])]
    prepare_rows(world.folder, 'hellaswag', rows)
    got = world(Bigram(table), '--ckpt=x', '--tasks=hellaswag', '--limit=0')[0]['results']['hellaswag']
    assert [got[k]['value'] for k in ('sum', 'per_token', 'per_character')] == [3 / 6, 2 / 6, 1 / 6]


def test_hellaswag_text():
    assert evaluate.clean(' How to [title] Get [step] one  two   three ') == 'How to. Get one two  three'
    byte = prepare.tokenizer_from_state(BYTES)
    # a query that ends in a space gives it to the continuation
    assert evaluate.encode_pair(byte, 'ab ', ' c') == (list(b'ab'), list(b'  c'))


def test_left_truncation_in_closed_form():
    # targets of n a's after c others, block 8: the last min(c + n - 1, 8) inputs stay, so the target's positions end at
    # e = min(c + n - 1, 8) - 1 and start at s = e - n + 1: (s+1)/(e+2)
    pairs = [([1] * c, [ord('a')] * n) for c, n in ((1, 1), (3, 2), (7, 2), (8, 2), (30, 2), (30, 8), (1, 8))]
    ends = [min(len(c) + len(t) - 1, 8) - 1 for c, t in pairs]
    expected = [math.log((e - len(t) + 2) / (e + 2)) for e, (c, t) in zip(ends, pairs)]
    scores, greedy = evaluate.log_likelihoods(Patient(8), pairs, batch_size=3)
    assert scores == pytest.approx(expected, rel=1e-5)
    assert greedy.all()
    assert 'block_size' in fails(lambda: evaluate.log_likelihoods(Patient(8), [([1], [2] * 9)], 3))
    assert 'context' in fails(lambda: evaluate.log_likelihoods(Patient(8), [([], [2])], 3))


@pytest.mark.parametrize('attention', ['standard', 'diff', 'mta'])
def test_scores_do_not_depend_on_the_batch(attention):
    model = GPT(GPTConfig(block_size=24, n_pos=24, vocab_size=50, n_layer=3, n_head=2, n_embd=16, attention=attention,
                          coupling='alternating'), seed=1).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    g = np.random.default_rng(0)
    pairs = [(g.integers(50, size=g.integers(1, 40)).tolist(), g.integers(50, size=g.integers(1, 9)).tolist()) for _ in range(40)]
    alone, greedy = evaluate.log_likelihoods(model, pairs, 1)
    for batch_size in 7, 64:
        scores, same = evaluate.log_likelihoods(model, pairs, batch_size)
        assert np.abs(scores - alone).max() < 1e-4 and (same == greedy).all()


def test_sample_of_examples(world):
    prepare_rows(world.folder, 'lambada', [dict(text=f'row {i}') for i in range(50)])
    chosen = []
    for seed in 0, 0, 1:
        world(Bigram({}), '--ckpt=x', '--tasks=lambada', '--limit=10', f'--seed={seed}', '--json=out.json')
        chosen.append(json.loads((world.folder / 'out.json').read_text())['examples']['lambada']['indices'])
    assert chosen[0] == chosen[1] != chosen[2]
    assert all(len(set(c)) == 10 and c != list(range(10)) for c in chosen)

# ----------------------------------------------------------------------------------------------------------------------
# associative recall

class Recall(HandSet):
    """The answer where the asked key's parity is `parity`, read off the pairs at the start; else token 0."""
    def __init__(self, kv, parity, **kw):
        super().__init__(**kw)
        self.kv, self.parity = kv, parity

    def log_probs(self, idx):
        logits = torch.zeros(*idx.shape, self.config.vocab_size)
        for row in range(idx.size(0)):
            pairs = dict(zip(idx[row, 0:2 * self.kv:2].tolist(), idx[row, 1:2 * self.kv:2].tolist()))
            for t, token in enumerate(idx[row].tolist()):
                if token in pairs and token % 2 in self.parity:
                    logits[row, t, pairs[token]] = 1
        return logits


def test_mqar(world):
    prepare.prepare('mqar', kv='2,3', len='16,24', vocab=64, rows=500, data_dir=str(world.folder), out='toy')
    tokenizer = {'name': 'none'}
    right = world(Recall(3, (0, 1), block_size=24, vocab_size=64), '--ckpt=x', '--tasks=mqar', '--limit=0',
                  tokenizer=tokenizer)[0]['results']['mqar']
    assert right['kv3_len24'] == dict(value=1.0, se=0.0, n=50)
    # half of the keys are even: count the even questions in the files themselves
    half = world(Recall(3, (0,), block_size=24, vocab_size=64), '--ckpt=x', '--tasks=mqar', '--limit=0',
                 tokenizer=tokenizer)[0]['results']['mqar']['kv3_len24']['value']
    x, y = (np.fromfile(world.folder / 'toy' / f, t).reshape(-1, 24)[50:] for f, t in (('test.bin', '<u2'), ('test_labels.bin', '<i2')))
    assert half == pytest.approx((x[y != -1] % 2 == 0).mean()) and 0.3 < half < 0.7
    assert 'rows of 24' in fails(lambda: world(Recall(2, (0,), block_size=16, vocab_size=64), '--ckpt=x', '--tasks=mqar',
                                               tokenizer=tokenizer))
    assert '--tasks=mqar' in fails(lambda: world(Bigram({}), '--ckpt=x', '--tasks=lambada', tokenizer=tokenizer))

# ----------------------------------------------------------------------------------------------------------------------
# a trained checkpoint, from train.py to the scripts

@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run folder of 150 updates on a text of our own; data/ lies beside it."""
    folder = tmp_path_factory.mktemp('run')
    rng, words = np.random.default_rng(0), 'thé quick brown fox jumps over a lazy dog'.split()
    (folder / 'toy.txt').write_text('\n'.join(' '.join(rng.choice(words, 10)) for _ in range(400)))
    prepare.prepare('text', input=str(folder / 'toy.txt'), tokenizer='bpe:280', out='toy', data_dir=str(folder))
    data_dir, handlers = prepare.DATA_DIR, [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    prepare.DATA_DIR = folder
    try:
        train.main(['--dataset=toy', f'--out_dir={folder / "out"}', '--max_iters=150', '--eval_interval=100', '--device=cpu',
                    '--n_layer=1', '--n_head=1', '--n_embd=16', '--block_size=32', '--batch_size=8', '--compile=False',
                    '--gradient_accumulation_steps=1', '--warmup_iters=5', '--lr_decay_iters=150', '--learning_rate=0.02'])
    finally:
        prepare.DATA_DIR = data_dir
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers):
            signal.signal(number, handler)
    return folder


def test_the_number_that_training_printed(run, monkeypatch, capsys):
    monkeypatch.setattr(prepare, 'DATA_DIR', run)
    logged = [json.loads(line) for line in (run / 'out' / 'metrics.jsonl').read_text().splitlines()]
    evaluate.main([f'--ckpt={run}/out/last.pt', '--split=val', '--device=cpu'])
    got = json.loads(capsys.readouterr().out.splitlines()[-1])['results']['ppl']
    assert got['nats_per_token']['value'] == [line['val_loss'] for line in logged if 'val_loss' in line][-1]


def test_wrong_data(run, monkeypatch, capsys):
    monkeypatch.setattr(prepare, 'DATA_DIR', run)
    def message(*argv):
        return fails(evaluate.main, [f'--ckpt={run}/out/last.pt', '--device=cpu', *argv])
    assert 'python prepare.py brown' in message('--dataset=brown')
    assert 'python prepare.py lambada' in message('--tasks=ppl,lambada')
    (run / 'other').mkdir()
    ids = np.zeros(100, np.uint16)
    for split in 'train', 'val', 'test':
        ids.tofile(run / 'other' / f'{split}.bin')  # a nanoGPT folder: GPT-2 ids
    assert 'gpt2, 50257 ids' in message('--dataset=other') and 'bpe:280, 280 ids' in message('--dataset=other')
    assert '--stride=33' in message('--stride=33')
    assert 'no sample split' in message('--split=sample')
    prepare.prepare('mqar', kv='2', len='16', vocab=64, rows=20, data_dir=str(run), out='recall')
    assert 'tokenizer' in message('--tasks=mqar', '--dataset=recall')
    prepare_rows(run, 'lambada', [dict(text='one two')] * 3)
    assert '--limit=2000' in message('--tasks=lambada') and '3 examples' in message('--tasks=lambada')
    assert not capsys.readouterr().out.count('perplexity')  # refused before any work


def command(script, *argv, cwd='/'):
    return subprocess.run([sys.executable, str(HERE / script), *argv], capture_output=True, cwd=cwd, timeout=120)


@pytest.mark.parametrize('script, argv, words', [
    (evaluate, [], ['--ckpt']),
    (evaluate, ['--ckpt=nowhere.pt'], ['nowhere.pt', 'No such file']),
    (evaluate, ['--ckpt={data}'], ['no checkpoint of train.py']),
    (evaluate, ['--ckpt={run}/out/bset.pt'], ['best.pt', 'last.pt']),
    (evaluate, ['--ckpt={ckpt}', '--tasks=ppl,glue'], ["'glue'", 'ppl,lambada,hellaswag,mqar']),
    (evaluate, ['--ckpt={ckpt}', '--limit=-1'], ['--limit=-1']),
    (evaluate, ['--ckpt={ckpt}', '--json=no/such/folder.json'], ['no/such/folder.json']),
    (evaluate, ['--ckpt={ckpt}', '--device=tpu'], ["device = 'tpu'"]),
    (sample, ['--ckpt={ckpt}', '--prompt='], ['--prompt']),
    (sample, ['--ckpt={ckpt}', '--temperature=-1'], ['--temperature=-1']),
    (sample, ['--ckpt=nowhere.pt'], ['nowhere.pt', 'No such file']),
    (compare, ['--a={data}', '--b={data}'], ['evaluate.py --json']),
    (compare, [], ['--a']),
])
def test_mistakes_are_one_message(run, capsys, script, argv, words):
    places = dict(run=run, ckpt=run / 'out' / 'last.pt', data=run / 'toy' / 'test.bin')
    error = fails(script.main, [arg.format(**places) for arg in argv])
    assert error.startswith('error: ') and all(word in error for word in words) and not capsys.readouterr().out


@pytest.mark.parametrize('script', ['evaluate.py', 'sample.py', 'compare.py'])
def test_scripts_run_from_any_folder(script):
    done = command(script, '--ckptt=x')
    error = done.stderr.decode()
    assert done.returncode == 1 and error.startswith('error: ') and "'ckptt'" in error and 'Traceback' not in error


def test_sample(run):
    ckpt = f'{run}/out/last.pt'
    done = command('sample.py', f'--ckpt={ckpt}', '--prompt=thé ', '--max_new_tokens=40', '--num_samples=2', '--seed=3',
                   '--temperature=1.5', '--top_k=0', '--device=cpu')
    assert done.returncode == 0, done.stderr.decode()
    state = torch.load(ckpt, weights_only=True)
    model = GPT(GPTConfig(**state['model_args'])).eval()
    model.load_state_dict(state['model'])
    tokenizer, expected = prepare.tokenizer_from_state(state['tokenizer']), ''
    for seed in 3, 4:
        ids = model.generate(torch.tensor([tokenizer.encode_ordinary('thé ')]), 40, temperature=1.5, seed=seed)
        expected += tokenizer.decode(ids[0].tolist()) + '\n' + '-' * 40 + '\n'
    assert done.stdout.decode() == expected


def test_sample_decodes_characters_split_over_tokens(run, monkeypatch, capsys):
    # a model that writes 'é€' over and over, a byte a token: no replacement characters
    _, state = evaluate.load(f'{run}/out/last.pt')
    tokenizer = prepare.tokenizer_from_state(state['tokenizer'])
    cycle = [tokenizer.encode_single_token(bytes([byte])) for byte in 'é€'.encode()]
    model = SimpleNamespace(stream=lambda ids, n, *rest: (torch.tensor([[cycle[i % len(cycle)]]]) for i in range(n)))
    monkeypatch.setattr(sample, 'load', lambda path, device: (model, state))
    monkeypatch.setattr(sys.stdout, 'reconfigure', lambda **kw: None, raising=False)
    sample.main(['--ckpt=x', '--prompt=>', '--max_new_tokens=10', '--device=cpu'])
    assert capsys.readouterr().out == '>é€é€\n' + '-' * 40 + '\n'

# ----------------------------------------------------------------------------------------------------------------------
# comparison

def test_mcnemar_by_hand():
    assert compare.mcnemar(0, 0) == 1
    assert compare.mcnemar(1, 5) == 2 * (1 + 6) / 64  # 2 P(X <= 1), X ~ Bin(6, 1/2)
    assert compare.mcnemar(10, 10) == 1
    assert compare.mcnemar(3000, 2000) < 1e-40
    stats = pytest.importorskip('scipy.stats')
    for b, c in (3, 17), (40, 44), (700, 800):
        assert compare.mcnemar(b, c) == pytest.approx(stats.binomtest(b, b + c, 0.5).pvalue, rel=1e-9)


def test_bootstrap_of_a_mean_and_of_a_ratio():
    # 400 differences, +1 and -1 by turns: the bootstrap's error is the population std / sqrt(n) = 1/20, the interval +-1.96/20
    d = np.tile([1.0, -1.0], 200)
    se, low, high = compare.bootstrap(d, np.ones(400), 10000, 0)
    assert se == pytest.approx(1 / 20, rel=0.03) and (low, high) == pytest.approx((-0.098, 0.098), abs=0.006)
    # weight 0 removes an example
    se, low, high = compare.bootstrap(np.where(np.arange(400) < 200, 1.0, 9.0), np.arange(400) < 200, 200, 0)
    assert (se, low, high) == (0, 1, 1)


def test_compare(tmp_path, capsys):
    def write(name, values, **more):
        examples = dict(lambada=dict(data='sha', indices=[3, 5, 8, 9], values=dict(last_word=values)) | more)
        (tmp_path / name).write_text(json.dumps(dict(ckpt=name, step=1, examples=examples)))
        return tmp_path / name
    a, b = write('a.json', [1, 0, 0, 0]), write('b.json', [1, 1, 1, 0])
    compare.main([f'--a={a}', f'--b={b}'])
    got = json.loads(capsys.readouterr().out.splitlines()[-1])['results']['lambada']['last_word']
    assert (got['a'], got['b'], got['difference'], got['only_a'], got['only_b'], got['p']) == (0.25, 0.75, 0.5, 0, 2, 0.5)
    c = write('c.json', [1, 1, 1, 0], indices=[1, 5, 8, 9])
    assert 'indices differ' in fails(compare.main, [f'--a={a}', f'--b={c}'])

# ----------------------------------------------------------------------------------------------------------------------
# lm-evaluation-harness

LAMBADA = [dict(text=t) for t in (
    'the quick brown fox jumps over a lazy dog', 'a fox and a dog  met the fox', 'thé dog saw “the fox” and the fox',
    'over the lazy dog the quick fox, then the dog jumps', 'one word.', 'dog fox dog fox dog fox dog fox dog fox dog fox dog',
    'the brown dog jumps over a brown', 'a dog', 'it was a quick fox , said the dog .', 'lazy thé lazy thé lazy')]
HELLASWAG = [dict(ind=0, activity_label=label, ctx_a=a, ctx_b=b, endings=endings) for label, a, b, endings in (
    ('Jumping', 'A fox stands before a dog.', 'the fox', ['jumps over it.', 'is a lazy thé.', 'quick', 'brown, brown  dog']),
    ('How to jump', '[header] How to jump [title] Find a dog. [step] Any dog will do.', '', [
        ' [title] Jump [step] over the dog.', 'Sleep.', '[substeps] Be quick. Be brown.', 'a lazy dog']),
    ('Dogs', ' the dog  sees the lazy brown fox jump and jump and jump ', 'over [step]', ['a', 'the lazy dog jumps', 'é', '“fox”']),
    ('Thé', 'a lazy dog over a quick dog over a brown', 'QUICK dog', ['jumps', 'jumps over', 'a', 'jumps over a lazy dog']))]


@pytest.mark.skipif(not importlib.util.find_spec('lm_eval'), reason='needs pip install lm-eval, in an environment of its own')
@pytest.mark.parametrize('name, rows, measures', [('lambada', LAMBADA, dict(last_word='acc')),
                                                  ('hellaswag', HELLASWAG, dict(sum='acc', per_character='acc_norm'))])
def test_harness_agrees(run, tmp_path, monkeypatch, capsys, name, rows, measures):
    """The harness's task code and metrics, the model scored a sequence at a time and unpadded, on items made up here."""
    import lm_eval
    from lm_eval.api.model import TemplateLM
    # every item with its first 0, 1, 2, ... words left away: some dozens, of all lengths
    key = dict(lambada='text', hellaswag='ctx_a')[name]
    rows = [row | {key: ' '.join(row[key].split(' ')[i:])} for row in rows for i in range(max(1, len(row[key].split(' ')) - 1))]
    if name == 'hellaswag':
        rows = [row | dict(label=str(i % 4)) for i, row in enumerate(rows)]
    monkeypatch.setattr(prepare, 'DATA_DIR', tmp_path)
    prepare_rows(tmp_path, name, rows)
    model, state = evaluate.load(f'{run}/out/last.pt')
    tokenizer, size = prepare.tokenizer_from_state(state['tokenizer']), model.config.block_size

    class Wrapped(TemplateLM):
        eot_token_id = 0

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            return tokenizer.encode_ordinary(string)

        def _loglikelihood_tokens(self, requests, **kwargs):
            out = []
            for _, context, target in requests:
                ids = torch.tensor([(context + target)[-size - 1:]])
                with torch.no_grad():
                    p = model(ids[:, :-1], ids[:, 1:])[0][0, -len(target):].double().log_softmax(-1)
                chosen = ids[0, -len(target):, None]
                out.append((p.gather(1, chosen).sum().item(), bool((p.argmax(1) == chosen[:, 0]).all())))
            return out

        def loglikelihood_rolling(self, *args, **kwargs):
            raise NotImplementedError

        def generate_until(self, *args, **kwargs):
            raise NotImplementedError

    ours = []
    def recorded(*args, real=evaluate.log_likelihoods):
        ours.append(real(*args))
        return ours[-1]
    monkeypatch.setattr(evaluate, 'log_likelihoods', recorded)
    evaluate.main([f'--ckpt={run}/out/last.pt', f'--tasks={name}', '--limit=0', '--device=cpu', f'--json={tmp_path}/out.json'])
    values = json.loads((tmp_path / 'out.json').read_text())['examples'][name]['values']

    file = json.loads((tmp_path / name / 'meta.json').read_text())['file']
    split, theirs = dict(lambada=('test', 'lambada/lambada_openai'), hellaswag=('validation', 'hellaswag/hellaswag'))[name]
    theirs = Path(lm_eval.__file__).parent / 'tasks' / f'{theirs}.yaml'
    (tmp_path / 'local.yaml').write_text(f'include: {theirs}\ntask: local\ntraining_split: null\ndataset_path: json\ndataset_name: '
                                         f'null\ndataset_kwargs:\n  data_files:\n    {split}: {tmp_path / name / file}\n')
    theirs = lm_eval.simple_evaluate(model=Wrapped(), tasks=[str(tmp_path / 'local.yaml')], log_samples=True, bootstrap_iters=0)
    samples = sorted(theirs['samples']['local'], key=lambda sample: sample['doc_id'])
    assert len(samples) == len(rows) >= 24
    for measure, metric in measures.items():
        assert values[measure] == [sample[metric] for sample in samples], measure
        assert 0 < sum(values[measure]) < len(rows)  # else little is shown
    likelihoods = [float(answer[0]) for sample in samples for answer in sample['filtered_resps']]
    worst = np.abs(np.array(likelihoods) - ours[-1][0]).max()
    assert worst < 1e-4
    with capsys.disabled():
        print(f'{name}: {len(rows)} items, {len(likelihoods)} continuations, largest difference {worst:.1e} nats')
