"""
Tests of analyze.py: python -m pytest -q experiments/test_analyze.py

The answers are computed by hand, or by numpy from the weights of a model, without its code.
"""
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

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import analyze
import prepare
import train
from model import GPT, GPTConfig

torch.set_num_threads(1)


def causal(logits):
    """numpy: softmax over the keys seen, (..., T, T) -> same"""
    p = np.where(np.tri(logits.shape[-1], dtype=bool), np.exp(logits - logits.max(-1, keepdims=True)), 0)
    return p / p.sum(-1, keepdims=True)


def rank_of(p):
    """numpy: effective rank of one T x T map"""
    s = np.linalg.svd(p, compute_uv=False)
    s = s[s > 0] / s.sum()
    return math.exp(-(s * np.log(s)).sum())


def pr_of(x):
    """numpy: participation ratio of tokens (n, d) from the eigenvalues of their covariance"""
    e = np.linalg.eigvalsh(np.cov(x.T, bias=True))
    return e.sum() ** 2 / (e ** 2).sum()


def tiny(**settings):
    model = GPT(GPTConfig(**dict(block_size=12, n_pos=12, vocab_size=40, n_layer=1, n_head=2, n_embd=16) | settings), seed=1)
    with torch.no_grad():  # the initial weights are so small that every map is nearly uniform
        for name, p in model.named_parameters():
            if name.endswith(('c_q.weight', 'c_k.weight')):
                p.mul_(20)
    return model.eval()


def ids(n=3, T=12, seed=0):
    return np.random.default_rng(seed).integers(40, size=(n, T))


def one(model, *args):
    """Measures of the only layer, as numpy arrays."""
    layer, = analyze.measure(model, *args)
    return {name: value.numpy() for name, value in layer.items()}


def fails(function, *args):
    with pytest.raises((SystemExit, prepare.DataError)) as e:
        function(*args)
    return str(e.value)

# ----------------------------------------------------------------------------------------------------------------------
# measures of maps

def test_effective_rank_by_hand():
    blocks = torch.block_diag(torch.full((2, 2), 0.5), torch.full((2, 2), 0.5))  # singular values 1, 1, 0, 0
    maps = torch.stack([torch.eye(4), torch.full((4, 4), 0.25), blocks])
    assert analyze.effective_rank(maps).tolist() == pytest.approx([4, 1, 2], rel=1e-5)
    # ((1, 0), (1/2, 1/2)): s1 s2 = |det| = 1/2 and s1^2 + s2^2 = 3/2, so (s1 +- s2)^2 = 3/2 +- 1
    s1, s2 = (math.sqrt(2.5) + math.sqrt(0.5)) / 2, (math.sqrt(2.5) - math.sqrt(0.5)) / 2
    p, q = s1 / (s1 + s2), s2 / (s1 + s2)
    assert analyze.effective_rank(torch.tensor([[1, 0], [0.5, 0.5]])).item() == pytest.approx(p ** -p * q ** -q, rel=1e-5)


def test_effective_rank_agrees_with_numpy():
    maps = causal(np.random.default_rng(0).normal(size=(2, 3, 20, 20)) * 3)
    got = analyze.effective_rank(torch.tensor(maps, dtype=torch.float32)).numpy()
    assert got == pytest.approx(np.array([[rank_of(p) for p in row] for row in maps]), rel=1e-4)


def test_rows_by_hand():
    uniform = torch.tensor([[1, 0, 0, 0], [1 / 2, 1 / 2, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [1 / 4, 1 / 4, 1 / 4, 1 / 4]])
    got = analyze.of_rows(uniform)
    assert got['entropy'].item() == pytest.approx(1) and got['top1'].item() == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert got['logit_variance'].item() == pytest.approx(0, abs=1e-10) and got['underflow'].item() == 0
    got = analyze.of_rows(torch.eye(3))
    assert got['entropy'].item() == 0 and got['top1'].item() == 1
    assert got['underflow'].item() == pytest.approx((1 / 2 + 2 / 3) / 2)
    # (3/4, 1/4): logits that differ by ln 3 have the variance (ln 3 / 2)^2
    got = analyze.of_rows(torch.tensor([[1, 0], [3 / 4, 1 / 4]]))
    assert got['entropy'].item() == pytest.approx((0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(2))
    assert got['logit_variance'].item() == pytest.approx(math.log(3) ** 2 / 4) and got['top1'].item() == 0.75


def test_logit_variance_is_that_of_the_logits():
    logits = np.random.default_rng(0).normal(size=(2, 10, 10)) * 4 + 7  # the 7 leaves no trace in the map
    got = analyze.of_rows(torch.tensor(causal(logits), dtype=torch.float32))['logit_variance'].numpy()
    assert got == pytest.approx([np.mean([row[i, :i + 1].var() for i in range(1, 10)]) for row in logits], rel=1e-4)


def test_underflow_gives_a_lower_bound():
    # logits 0 and -200: the variance is 100^2, but exp(-200) is no float32, whose smallest is 2^-126: (126 ln 2 / 2)^2
    got = analyze.of_rows(torch.tensor([[0, -math.inf], [0, -200]]).softmax(-1))
    assert got['underflow'].item() == 0.5
    assert got['logit_variance'].item() == pytest.approx((63 * math.log(2)) ** 2, rel=1e-5)

# ----------------------------------------------------------------------------------------------------------------------
# measures of q and k

def test_participation_ratio_by_hand():
    def pr(x):
        first, second = analyze.moments(x[None, :, None])
        return analyze.participation_ratio(first[0, 0], second[0, 0]).item()
    axes = torch.cat([torch.eye(5), -torch.eye(5)])
    assert pr(axes + 3) == pytest.approx(5)  # the same in all directions, about (3, ..., 3)
    assert pr(axes * torch.tensor([1, 1, 0, 0, 0]) - 1) == pytest.approx(2)
    assert pr(torch.arange(7)[:, None] * torch.tensor([1, 2, 3])) == pytest.approx(1)
    assert pr(axes[:, :2] * torch.tensor([1, 2])) == pytest.approx((1 + 4) ** 2 / (1 + 16))
    assert math.isnan(pr(torch.ones(4, 3)))
    x = np.random.default_rng(0).normal(size=(50, 6)) * np.arange(1, 7) + 2
    assert pr(torch.tensor(x)) == pytest.approx(pr_of(x))


@torch.no_grad()
def set_scales(model, *rounds):
    """Weights of the nets stay zero: each round multiplies q by exp of its first number, k by exp of the second."""
    for net, (a, b) in zip(model.transformer.h[0].attn.coupling.nets, rounds, strict=True):
        d = model.config.d_head
        net.net_q.out.bias[:d], net.net_k.out.bias[:d] = torch.as_tensor(a), torch.as_tensor(b)


@pytest.mark.parametrize('coupling', ['alternating', 'simultaneous'])
def test_hand_set_coupling(coupling):
    model = tiny(coupling=coupling)
    set_scales(model, (0.5, -0.2))
    got = one(model, ids(), 2)
    assert got['action_q'] == pytest.approx([math.exp(0.5) - 1] * 2, rel=1e-5)
    assert got['action_k'] == pytest.approx([1 - math.exp(-0.2)] * 2, rel=1e-5)
    assert got['pr_q_ratio'] == pytest.approx([1, 1], rel=1e-4) and got['pr_k_ratio'] == pytest.approx([1, 1], rel=1e-4)
    assert got['log_scale_q_mean'] == pytest.approx(np.full((1, 2), 0.5))
    assert got['log_scale_k_mean'] == pytest.approx(np.full((1, 2), -0.2))
    assert got['log_scale_q_std'] == pytest.approx(np.zeros((1, 2)), abs=1e-6)
    assert not got['log_scale_q_clamped'].any() and not got['log_scale_k_clamped'].any()

    set_scales(model, (4.0, [-3.5, 1, 1, 1, 2.9, 1, 1, 3.5]))  # 4 is cut to 3; of k's, two of eight are
    got = one(model, ids(), 2)
    assert got['action_q'] == pytest.approx([math.exp(3) - 1] * 2, rel=1e-5)
    assert got['log_scale_q_clamped'] == pytest.approx(np.ones((1, 2)))
    assert got['log_scale_k_clamped'] == pytest.approx(np.full((1, 2), 2 / 8))
    assert got['log_scale_k_mean'] == pytest.approx(np.full((1, 2), 7.9 / 8))
    assert got['log_scale_k_std'] == pytest.approx(np.full((1, 2), math.sqrt((9 + 9 + 5 + 2.9 ** 2) / 8 - (7.9 / 8) ** 2)))


def test_action_of_a_shift():
    # each token's own |t| / |q|, then the mean
    model, x, t = tiny(coupling='alternating'), ids(), np.linspace(-1, 1, 8)
    with torch.no_grad():
        model.transformer.h[0].attn.coupling.nets[0].net_q.out.bias[8:] = torch.tensor(t)
    got, (q, _) = one(model, x, 2), by_numpy(model, x)
    assert got['action_q'] == pytest.approx(np.mean(np.linalg.norm(t) / np.linalg.norm(q, axis=-1), axis=(0, 1)), rel=1e-4)
    assert got['pr_q_ratio'] == pytest.approx([1, 1], rel=1e-4) and not got['action_k'].any()


def test_rounds_and_grouped_queries():
    model = tiny(coupling='alternating', coupling_rounds=2, n_head=4, n_kv_head=2, n_embd=32)
    set_scales(model, (0.5, 3.0), (-0.1, 0.2))
    got = one(model, ids(), 2)
    assert got['action_q'] == pytest.approx([math.exp(0.4) - 1] * 4, rel=1e-5)
    assert got['action_k'] == pytest.approx([math.exp(3.2) - 1] * 2, rel=1e-5)
    assert got['log_scale_q_mean'] == pytest.approx(np.array([[0.5] * 2, [-0.1] * 2]))
    assert got['log_scale_k_clamped'] == pytest.approx(np.array([[1, 1], [0, 0]]))
    assert [got[f'pr_{s}_after'].shape for s in 'qk'] == [(4,), (2,)]


@pytest.mark.parametrize('coupling', ['none', 'alternating', 'cross_mlp'])
def test_identity(coupling):
    got = one(tiny(coupling=coupling), ids(), 2)
    assert not got['action_q'].any() and not got['action_k'].any()
    assert got['pr_q_before'].tolist() == got['pr_q_after'].tolist() and got['pr_k_ratio'].tolist() == [1, 1]
    assert ('log_scale_q_mean' in got) == (coupling == 'alternating')

# ----------------------------------------------------------------------------------------------------------------------
# whole models

def by_numpy(model, x):
    """q and k (windows, T, H, d) of the first layer, from its weights."""
    w = {name: p.double().numpy() for name, p in model.state_dict().items()}
    h = w['transformer.wte.weight'][x] + w['transformer.wpe.weight'][:x.shape[1]]
    h = h / np.sqrt((h ** 2).mean(-1, keepdims=True) + 1e-6)  # the norm's weights are 1
    return [(h @ w[f'transformer.h.0.attn.c_{side}.weight'].T).reshape(*x.shape, model.config.n_head, -1) for side in 'qk']


@pytest.mark.parametrize('attention', ['standard', 'diff'])
def test_a_layer_by_numpy(attention):
    """diff: each softmax is measured by itself, with its own half of q and k."""
    model, x = tiny(attention=attention), ids(3)
    q, k = by_numpy(model, x)
    parts = 2 if attention == 'diff' else 1
    d = 8 // parts
    got = one(model, x, 2)
    assert got['effective_rank'].shape == (parts, 2)
    for m in range(parts):
        for head in range(2):
            half = slice(m * d, (m + 1) * d)
            logits = q[:, :, head, half] @ k[:, :, head, half].transpose(0, 2, 1) / math.sqrt(d)  # (windows, T, T)
            maps, i = causal(logits), np.arange(1, 12)
            entropy = -np.where(maps > 0, maps * np.log(np.maximum(maps, 1e-99)), 0).sum(-1)
            expected = dict(effective_rank=np.mean([rank_of(p) for p in maps]), top1=maps[:, 1:].max(-1).mean(),
                            entropy=(entropy[:, 1:] / np.log(i + 1)).mean(),
                            logit_variance=np.mean([row[j, :j + 1].var() for row in logits for j in i]))
            assert {name: got[name][m, head] for name in expected} == pytest.approx(expected, rel=1e-3)
            assert expected['logit_variance'] > 0.1 and got['underflow'][m, head] == 0
    for side, z in ('q', q), ('k', k):
        assert got[f'pr_{side}_before'] == pytest.approx([pr_of(z[:, :, head].reshape(-1, 8)) for head in range(2)], rel=1e-4)


def test_mta_is_measured_at_its_softmax():
    # doubled scores have four times the variance; what comes after the softmax of the last layer changes nothing
    base, model = tiny(), tiny(attention='mta')
    with torch.no_grad():
        model.transformer.h[0].attn.score.mix_pre.mul_(2)
    assert one(model, ids(), 3)['logit_variance'] == pytest.approx(4 * one(base, ids(), 3)['logit_variance'], rel=1e-3)
    model = tiny(attention='mta', n_layer=3)
    before = analyze.measure(model, ids(), 3)
    with torch.no_grad():
        for p in model.transformer.h[2].attn.score.mix_post, model.transformer.h[2].attn.score.kernel_post:
            p.zero_()
    after = analyze.measure(model, ids(), 3)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(before, after) for name in a)


@pytest.mark.parametrize('settings', [dict(attention='diff', coupling='alternating'), dict(coupling='simultaneous', n_kv_head=1)])
def test_numbers_do_not_depend_on_the_batch(settings):
    model = tiny(n_layer=2, **settings)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if '.coupling.' in name:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
    alone = analyze.measure(model, ids(5), 1)
    for batch_size in 2, 5, 9:
        for a, b in zip(alone, analyze.measure(model, ids(5), batch_size), strict=True):
            assert a.keys() == b.keys()
            for name in a:
                assert a[name].numpy() == pytest.approx(b[name].numpy(), rel=1e-4, abs=1e-6), name
    assert alone[1]['action_q'].min() > 0.01 and alone[0]['pr_q_before'].min() > 1
    # of maps, the mean of two windows' numbers
    pair = [analyze.measure(model, ids(5)[i:j], 9) for i, j in ((0, 1), (1, 2), (0, 2))]
    for name in 'effective_rank', 'entropy', 'top1', 'logit_variance', 'action_k', 'log_scale_q_mean':
        first, second, both = (layers[1][name].numpy() for layers in pair)
        assert both == pytest.approx((first + second) / 2, rel=1e-4)
        assert first != pytest.approx(second, rel=1e-3)


def test_last_third():
    assert analyze.last_third(list(range(24))) == [16, 17, 18, 19, 20, 21, 22, 23]
    assert analyze.last_third([0, 1, 2, 3]) == [2, 3] and analyze.last_third([0]) == [0]


def test_json_has_no_nan():
    assert analyze.plain(torch.tensor([[math.nan, math.inf], [1.23456789, 0]]).double()) == [[None, None], [1.23457, 0]]


def test_hooks_do_not_stay():
    model = tiny(coupling='alternating')
    analyze.measure(model, ids(), 3)
    assert not any(module._forward_hooks for module in model.modules())

# ----------------------------------------------------------------------------------------------------------------------
# from train.py to the output

VARIANTS = dict(standard=[], diff=['--attention=diff', '--coupling=alternating'], mta=['--attention=mta', '--qk_norm=True'],
                gqa=['--coupling=simultaneous', '--pos=rope', '--n_kv_head=1'])


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """VARIANT/last.pt of three updates each, and the corpora toy (bytes) and recall (mqar); data/ lies beside them."""
    folder = tmp_path_factory.mktemp('run')
    rng, words = np.random.default_rng(0), 'thé quick brown fox jumps over a lazy dog'.split()
    (folder / 'toy.txt').write_text('\n'.join(' '.join(rng.choice(words, 10)) for _ in range(200)), encoding='utf-8')
    data_dir, handlers = prepare.DATA_DIR, [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    prepare.DATA_DIR = folder
    try:
        prepare.prepare('text', input=str(folder / 'toy.txt'), tokenizer='byte', out='toy', data_dir=str(folder))
        prepare.prepare('mqar', kv='2', len='16', vocab=64, rows=50, data_dir=str(folder), out='recall')
        for name, argv in VARIANTS.items():
            train.main(['--dataset=toy', f'--out_dir={folder / name}', '--max_iters=3', '--eval_iters=1', '--device=cpu',
                        '--n_layer=2', '--n_head=2', '--n_embd=16', '--block_size=24', '--batch_size=2', '--compile=False',
                        '--gradient_accumulation_steps=1', '--warmup_iters=0', '--learning_rate=0.02', *argv])
    finally:
        prepare.DATA_DIR = data_dir
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers):
            signal.signal(number, handler)
    return folder


@pytest.fixture
def world(folder, tmp_path, monkeypatch, capsys):
    """analyze(variant, argv) -> (JSON document of the last line, table), in a folder of the test."""
    monkeypatch.setattr(prepare, 'DATA_DIR', folder)
    monkeypatch.chdir(tmp_path)

    def run(variant, *argv):
        analyze.main([f'--ckpt={folder / variant / "last.pt"}', '--device=cpu', *argv])
        lines = capsys.readouterr().out.splitlines()
        return json.loads(lines[-1]), lines[:-1]
    return run


@pytest.mark.parametrize('variant', VARIANTS)
def test_a_trained_checkpoint(world, folder, variant):
    document, table = world(variant, '--windows=5', '--batch_size=2', '--json=out.json')
    assert json.loads(Path('out.json').read_text()) == document
    assert {*document['config']} == {*'ckpt text dataset split windows seed batch_size device dtype png json'.split()}
    assert document['step'] == 3 and len(document['windows']) == 5 and document['tokens'] == 24
    layers, K, maps = document['layers'], 1 if variant == 'gqa' else 2, 2 if variant == 'diff' else 1
    assert len(layers) == 2
    for layer in layers:
        assert np.shape(layer['effective_rank']) == np.shape(layer['underflow']) == (maps, 2)
        assert np.shape(layer['pr_q_after']) == (2,) and np.shape(layer['action_k']) == (K,)
        assert 1 <= np.min(layer['effective_rank']) and np.max(layer['effective_rank']) <= 24
    coupled = variant in ('diff', 'gqa')
    assert (np.min(layers[0]['action_q']) > 0) == coupled == ('log_scale_k_clamped' in layers[0])
    # means: the third of two layers, rounded up, is the last one
    for name in 'entropy', 'pr_k_before':
        assert document['summary']['all'][name] == pytest.approx(np.mean([layer[name] for layer in layers]), rel=1e-5)
        assert document['summary']['last_third'][name] == pytest.approx(np.mean(layers[1][name]), rel=1e-5)
    rows = [line.split() for line in table if line.split()[0] in ('0', '1')]
    assert [float(row[3]) for row in rows[:2]] == pytest.approx([np.mean(layer['entropy'][0]) for layer in layers], abs=1e-4)
    # the same windows give the same numbers, another seed other windows
    assert world(variant, '--windows=5')[0]['summary']['all'] == pytest.approx(document['summary']['all'], rel=1e-4, abs=1e-6)
    assert world(variant, '--windows=5', '--seed=1')[0]['windows'] != document['windows']


@pytest.mark.parametrize('variant', ['standard', 'diff'])
def test_heat_maps(world, monkeypatch, variant):
    Axes, drawn = pytest.importorskip('matplotlib.axes').Axes, []
    monkeypatch.setattr(Axes, 'imshow', lambda self, grid, real=Axes.imshow, **kw: drawn.append(grid) or real(self, grid, **kw))
    layers = world(variant, '--windows=2', '--png=maps')[0]['layers']
    names = ['effective_rank', 'entropy', 'top1']
    if variant == 'diff':  # without a coupling there is nothing to see in the others
        names += ['pr_q_ratio', 'action_q', 'pr_k_ratio', 'action_k']
    assert {path.name for path in Path().glob('*.png')} == {f'maps_{name}.png' for name in names}
    assert all(path.read_bytes()[:4] == b'\x89PNG' for path in Path().glob('*.png'))
    for name, grid in zip(names, drawn, strict=True):  # diff: a row for each map of each layer
        assert grid == pytest.approx(np.array([layer[name] for layer in layers]).reshape(-1, 2), rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize('variant', VARIANTS)
def test_bfloat16(world, variant):
    half, full = (world(variant, '--windows=3', f'--dtype={dtype}')[0]['summary']['all'] for dtype in ('bfloat16', 'float32'))
    for name in 'effective_rank', 'entropy', 'top1', 'pr_q_before', 'pr_k_after':
        assert half[name] == pytest.approx(full[name], rel=0.03), name


def test_what_is_read(world, folder, monkeypatch):
    # bytes are tokens: the windows can be read off the text
    Path('text').write_bytes(b'the quick brown fox jumps over the lazy dog' * 2)  # 86 bytes: three windows of 24
    seen = []
    monkeypatch.setattr(analyze, 'measure', lambda model, windows, *args, real=analyze.measure:
                        seen.append(windows) or real(model, windows, *args))
    document, _ = world('standard', '--text=text', '--windows=0')
    assert [bytes(row.tolist()) for row in seen.pop()] == [b'the quick brown fox jump', b's over the lazy dogthe q',
                                                           b'uick brown fox jumps ove']
    assert document['windows'] == [0, 1, 2] and document['source'] == 'text'
    Path('short').write_text('a fox')
    document, _ = world('standard', '--text=short', '--windows=1')
    assert seen.pop().tolist() == [list(b'a fox')] and document['tokens'] == 5
    document, _ = world('standard', '--split=test', '--windows=2')
    test = np.fromfile(folder / 'toy' / 'test.bin', np.uint16)
    assert seen.pop().tolist() == [test[24 * i:24 * i + 24].tolist() for i in document['windows']]


def test_rows_of_associative_recall(folder, monkeypatch):
    monkeypatch.setattr(prepare, 'DATA_DIR', folder)
    cfg = SimpleNamespace(text='', dataset='', split='train', windows=3, seed=0, ckpt='x')
    state = dict(tokenizer={'name': 'none'}, data=dict(name='recall', sha256=prepare.open_corpus('recall').sha256))
    model = SimpleNamespace(config=SimpleNamespace(block_size=20, vocab_size=64))
    rows, _, chosen = analyze.read_windows(cfg, model, state)
    expected = np.fromfile(folder / 'recall' / 'train.bin', np.uint16).reshape(-1, 16)[chosen]
    assert rows.tolist() == expected.tolist() and len(chosen) == 3
    model.config.block_size = 15
    assert 'rows of 16 tokens' in fails(analyze.read_windows, cfg, model, state)
    cfg.text = 'toy.txt'
    assert 'stand for no text' in fails(analyze.read_windows, cfg, model, state)


@pytest.mark.parametrize('argv, words', [
    (['--ckpt='], ['--ckpt is missing']),
    (['--ckpt=nowhere.pt'], ['nowhere.pt', 'No such file']),
    (['--batch_size=0'], ['--batch_size=0', '1 or more']),
    (['--windows=-1'], ['--windows=-1', '0 or more']),
    (['--windows=9999'], ['--windows=9999', 'toy, val split', '--windows=0 takes all']),
    (['--text=nowhere.txt'], ['--text=nowhere.txt', 'UTF-8']),
    (['--text=latin'], ['--text=latin', 'UTF-8']),
    (['--text=one'], ['--text=one has 1 tokens']),
    (['--text=one', '--dataset=toy'], ['--text=one', '--dataset=toy', 'one of them']),
    (['--dataset=brown'], ['python prepare.py brown']),
    (['--split=sample'], ['no sample split']),
    (['--json=no/such/folder.json'], ['--json=no/such/folder.json', 'writable']),
    (['--png=no/such/folder'], ['--png=no/such/folder', 'writable']),
    (['--json=one'], ['--json=one', 'exists']),
    (['--png=old'], ['--png=old', 'old_top1.png exists']),
    (['--device=tpu'], ["device = 'tpu'"]),
])
def test_mistakes_are_one_message(world, capsys, argv, words):
    Path('one').write_text('a')
    Path('latin').write_bytes('thé'.encode('latin-1'))
    Path('old_top1.png').write_text('kept')
    error = fails(world, 'standard', *argv)
    assert all(word in error for word in words) and '\n' not in error and not capsys.readouterr().out
    assert Path('one').read_text() == 'a' and Path('old_top1.png').read_text() == 'kept'


def test_runs_from_any_folder():
    done = subprocess.run([sys.executable, str(HERE / 'analyze.py'), '--ckptt=x'], capture_output=True, cwd='/', timeout=120)
    error = done.stderr.decode()
    assert done.returncode == 1 and error.startswith('error: ') and "'ckptt'" in error and 'Traceback' not in error
