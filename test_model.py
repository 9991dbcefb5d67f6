"""
Tests: python -m pytest -q. Everything runs on a CPU.

Expected values come from the papers' tables, from computations by hand or from loops written from the formulas here,
never from the code under test.
"""
import itertools
import math
import shutil

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from model import ATTENTIONS, COUPLINGS, GPT, GPTConfig, SIZES, Coupling, Diff, MTA

torch.set_num_threads(1)  # the models here are tiny

V2_COUPLINGS = ['one_way', 'alternating', 'simultaneous', 'cross_mlp', 'linear_mix', 'independent']
EVERY = [(a, c) for a in ATTENTIONS for c in ['none', *COUPLINGS]]

def tiny(**kw):
    return GPTConfig(**{**dict(block_size=24, n_pos=32, vocab_size=61, n_layer=3, n_head=4, n_embd=32), **kw})

def shake(model, scale=0.2, seed=0):
    """Move couplings and scoring parameters away from their identity start, so that tests see them work."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if 'coupling' in name or 'score' in name or 'nets' in name:
                p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype) * scale)
    return model

def tokens(rows=2, length=24, vocab=61, seed=0):
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))

def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)

# ----------------------------------------------------------------------------------------------------------------------
# published numbers

@pytest.mark.parametrize('settings, published', [
    (dict(), 60_343_296),                           # [v2] Table 14
    (dict(coupling='one_way'), 60_408_896),
    (dict(coupling='alternating'), 60_541_952),
    (dict(n_kv_head=2), 57_197_568),
    (dict(attention='diff'), 60_343_360),
    (SIZES['150m'], 153_435_648),
    (SIZES['455m'], 456_263_680),
    (dict(attention='mta'), 60_343_296 + 4_168),    # [mta]'s recipe at 60M
    (dict(coupling='simultaneous'), 60_343_296 + 198_656),
    (dict(coupling='cross_mlp'), 60_343_296 + 262_144),
    (dict(coupling='linear_mix'), 60_343_296 + 1_048_576),
    (dict(coupling='independent'), 60_343_296 + 65_536),
    (dict(coupling='euler'), 60_343_296 + 65_600),
    (dict(coupling='leapfrog'), 60_343_296 + 65_600),
    (dict(coupling='mlp_only'), 60_343_296 + 65_600),
], ids=str)
def test_parameter_counts(settings, published):
    with torch.device('meta'):
        assert GPT(GPTConfig(**settings)).get_num_params() == published

def test_block_size_does_not_change_the_count():
    with torch.device('meta'):
        assert GPT(GPTConfig(block_size=1024)).get_num_params() == 60_343_296
        assert GPT(GPTConfig(pos='rope')).get_num_params() == 60_343_296 - 2048 * 512

def test_lambda_init_by_hand():
    for layer, value in [(0, 0.2), (1, 0.8 - 0.6 * 0.74081822), (7, 0.8 - 0.6 * 0.12245643)]:
        assert Diff(tiny(), layer).lam.tolist() == pytest.approx([value] * 4, abs=1e-6)

# ----------------------------------------------------------------------------------------------------------------------
# couplings

def test_shared_weights_start_equal_whatever_else_is_there():
    base = GPT(tiny(), seed=3).state_dict()
    for attention, coupling in EVERY:
        other = GPT(tiny(attention=attention, coupling=coupling, qk_norm=True), seed=3).state_dict()
        assert all(torch.equal(base[name], other[name]) for name in base)
    other = GPT(tiny(), seed=4).state_dict()
    assert not torch.equal(base['transformer.wte.weight'], other['transformer.wte.weight'])

@pytest.mark.parametrize('attention', ATTENTIONS)
@pytest.mark.parametrize('coupling', V2_COUPLINGS)
def test_identity_at_initialization_is_bitwise(attention, coupling):
    x = tokens()
    for kw in (dict(), dict(n_kv_head=1), dict(pos='rope', qk_norm=True), dict(lean=False), dict(flash=False)):
        base, composed = (GPT(tiny(attention=attention, coupling=c, **kw)) for c in ('none', coupling))
        assert torch.equal(base(x, x)[0], composed(x, x)[0])
        with torch.autocast('cpu', torch.bfloat16):
            assert torch.equal(base(x, x)[0], composed(x, x)[0])

@pytest.mark.parametrize('coupling', ['alternating', 'one_way', 'leapfrog'])
@pytest.mark.parametrize('rounds, n_kv_head', [(1, 4), (3, 4), (2, 2), (1, 1)])
def test_inverse(coupling, rounds, n_kv_head):
    config = tiny(coupling=coupling, coupling_rounds=rounds, n_kv_head=n_kv_head).validate()
    c = shake(Coupling(config).double(), 0.25)
    q, k = randn(2, 5, 4, 8, seed=1), randn(2, 5, n_kv_head, 8, seed=2)
    q_new, k_new = c(q, k)
    assert (q_new - q).abs().max() > 0.1
    back = c.inverse(q_new, k_new)
    tol = 1e-12 if rounds < 3 else 1e-9                                   # each round may amplify rounding by exp(3)
    assert (back[0] - q).abs().max() < tol and (back[1] - k).abs().max() < tol

def silu(x):
    return x / (1 + torch.exp(-x))

def loop_coupling(name, c, q, k, H, K):
    """One round of each coupling for one token, written from the formulas; q: H vectors, k: K vectors."""
    G = H // K
    two_layer = lambda net, x: net.out.weight @ silu(net.hidden.weight @ x)
    def affine(net, x):
        out = two_layer(net, x) + net.out.bias
        return torch.exp(torch.clamp(out[:len(x)], -3, 3)), out[len(x):]
    group = lambda vectors, j: sum(vectors[j * G + g] for g in range(G)) / G
    if name in ('alternating', 'simultaneous'):
        new = []
        for h in range(H):
            scale, shift = affine(c.net_q, k[h // G])
            new.append(q[h] * scale + shift)
        source, keys = (new if name == 'alternating' else q), []
        for j in range(K):
            scale, shift = affine(c.net_k, group(source, j))
            keys.append(k[j] * scale + shift)
        return new, keys
    if name == 'one_way':
        return [q[h] * torch.exp(c.log_scale[h]) + two_layer(c.net, k[h // G]) for h in range(H)], k
    if name == 'independent':
        return [x + two_layer(c.net_q, x) for x in q], [x + two_layer(c.net_k, x) for x in k]
    if name in ('cross_mlp', 'linear_mix'):
        d = len(q[0])
        moves = []
        for h in range(H):
            both = torch.cat([q[h], k[h // G]])
            moves.append(two_layer(c.net, both) if name == 'cross_mlp' else c.mix[h] @ both)
        return ([q[h] + moves[h][:d] for h in range(H)],
                [k[j] + group([m[d:] for m in moves], j) for j in range(K)])
    dt_k = [group(c.dt, j) for j in range(K)]
    f = lambda vectors, j: two_layer(c.net, group(vectors, j))
    if name == 'mlp_only':
        return [q[h] + c.dt[h] * two_layer(c.net, q[h]) for h in range(H)], k
    if name == 'euler':
        return [q[h] + c.dt[h] * k[h // G] for h in range(H)], [k[j] + dt_k[j] * f(q, j) for j in range(K)]
    if name == 'leapfrog':
        k = [k[j] + dt_k[j] / 2 * f(q, j) for j in range(K)]
        q = [q[h] + c.dt[h] * k[h // G] for h in range(H)]
        return q, [k[j] + dt_k[j] / 2 * f(q, j) for j in range(K)]

@pytest.mark.parametrize('name', COUPLINGS)
@pytest.mark.parametrize('n_kv_head', [4, 2])
def test_coupling_against_loop(name, n_kv_head):
    rounds = min(2, COUPLINGS[name].max_rounds)
    c = shake(Coupling(tiny(coupling=name, coupling_rounds=rounds, n_kv_head=n_kv_head).validate()).double(), 0.7)
    q, k = randn(1, 3, 4, 8, seed=1), randn(1, 3, n_kv_head, 8, seed=2)
    q_new, k_new = c(q, k)
    for t in range(3):
        qs, ks = list(q[0, t]), list(k[0, t])
        for i in range(rounds):
            qs, ks = loop_coupling(name, c.nets[i % len(c.nets)], qs, ks, 4, n_kv_head)
        assert torch.allclose(q_new[0, t], torch.stack(qs), atol=1e-12)
        assert torch.allclose(k_new[0, t], torch.stack(ks), atol=1e-12)

@pytest.mark.parametrize('name', COUPLINGS)
@pytest.mark.parametrize('n_kv_head', [2, 1])
def test_coupling_gradients_float64(name, n_kv_head):
    config = tiny(coupling=name, n_head=2, n_embd=8, n_kv_head=n_kv_head, coupling_rounds=min(2, COUPLINGS[name].max_rounds))
    c = shake(Coupling(config.validate()).double(), 0.5)
    parameters = dict(c.named_parameters())
    def run(q, k, *values):
        return torch.func.functional_call(c, dict(zip(parameters, values)), (q, k))
    inputs = [randn(1, 2, 2, 4, seed=1), randn(1, 2, n_kv_head, 4, seed=2), *(p.detach() for p in parameters.values())]
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs])

def test_log_scales_are_clamped_and_pass_no_gradient_there():
    for lean in (True, False):
        c = Coupling(tiny(coupling='alternating', n_head=1, n_embd=2, lean=lean).validate()).double()
        with torch.no_grad():
            c.nets[0].net_q.out.bias.copy_(torch.tensor([50.0, 1.0, 0.0, 0.0]))  # s = (50, 1), t = 0
        q, k = torch.ones(1, 1, 1, 2).double(), torch.ones(1, 1, 1, 2).double()
        q_new, _ = c(q, k)
        assert q_new.flatten().tolist() == pytest.approx([math.exp(3), math.e])
        q_new.sum().backward()
        assert c.nets[0].net_q.out.bias.grad.tolist() == pytest.approx([0.0, math.e, 1.0, 1.0])

# ----------------------------------------------------------------------------------------------------------------------
# scoring methods against loops written from the formulas

def softmax_over(scores):
    m = max(scores)
    e = [math.exp(s - m) for s in scores]
    return [x / sum(e) for x in e]

@pytest.mark.parametrize('flash', [True, False])
def test_diff_against_loop(flash):
    T, H, d, layer = 6, 4, 8, 2
    diff = shake(Diff(tiny(attention='diff', flash=flash).validate(), layer).double(), 0.3)
    with torch.no_grad():
        diff.lam.add_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    q, k, v = (randn(1, T, H, d, seed=s) for s in (1, 2, 3))
    y = diff(q, k, v)
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
    for h, i in itertools.product(range(H), range(T)):
        out = torch.zeros(d, dtype=torch.float64)
        for part, weight in ((slice(0, d // 2), 1.0), (slice(d // 2, d), -diff.lam[h].item())):
            p = softmax_over([float(q[0, i, h, part] @ k[0, j, h, part]) / math.sqrt(d / 2) for j in range(i + 1)])
            for j in range(i + 1):
                out += weight * p[j] * v[0, j, h]
        out = out / torch.sqrt((out ** 2).mean() + 1e-6) * (1 - lambda_init)
        assert torch.allclose(y[0, i, h], out, atol=1e-10)

def mta_loop(mta, q, k, v):
    """[mta] one number at a time; q, k, v (T, H, d)."""
    T, H, d = q.shape
    S = torch.zeros(H, T, T, dtype=torch.float64)                         # zero above the diagonal
    for h, i in itertools.product(range(H), range(T)):
        for j in range(i + 1):
            S[h, i, j] = q[i, h] @ k[j, h] / math.sqrt(d)
    def convolve(S, kernel):
        out = torch.zeros_like(S)
        for h, i in itertools.product(range(H), range(T)):
            for j in range(i + 1):
                for a, b in itertools.product(range(6), range(-5, 6)):    # a queries back, b keys to the right
                    if i - a >= 0 and 0 <= j + b < T:
                        out[h, i, j] += kernel[h, 0, 5 - a, 5 + b] * S[h, i - a, j + b]
        return out
    def mix(S, matrix):
        return torch.stack([sum(matrix[h, g] * S[g] for g in range(H)) for h in range(H)])
    if mta.conv:
        S = convolve(S, mta.kernel_pre)
    S = mix(S, mta.mix_pre)
    P = torch.zeros_like(S)
    for h, i in itertools.product(range(H), range(T)):
        P[h, i, :i + 1] = torch.tensor(softmax_over(S[h, i, :i + 1].tolist()), dtype=torch.float64)
    if mta.conv:
        P = convolve(P, mta.kernel_post)
    P = mix(P, mta.mix_post)
    y = torch.zeros(T, H, d, dtype=torch.float64)
    for h, i in itertools.product(range(H), range(T)):
        out = sum(P[h, i, j] * v[j, h] for j in range(i + 1))
        out = out / torch.sqrt((out ** 2).mean() + 1e-6) * mta.norm.weight
        y[i, h] = out * torch.sigmoid(mta.gate.weight[0] @ out + mta.gate.bias[0])
    return y

@pytest.mark.parametrize('layer', [0, 2])
@torch.no_grad()
def test_mta_against_loop(layer):
    T, H, d = 17, 2, 4
    mta = shake(MTA(tiny(attention='mta', n_head=H, n_embd=8).validate(), layer).double(), 0.3)
    for p in mta.parameters():
        p.add_(randn(*p.shape, seed=p.numel()) * 0.3)
    q, k, v = (randn(1, T, H, d, seed=s) for s in (1, 2, 3))
    expected = mta_loop(mta, q[0], k[0], v[0])
    for block in (1, 4, 7, 128):                                          # in blocks of queries, and at once
        assert torch.allclose(mta(q, k, v, block=block)[0], expected, atol=1e-10)
    mta.flash = False
    assert torch.allclose(mta(q, k, v)[0], expected, atol=1e-10)

def test_mta_convolves_every_fourth_layer():
    assert [layer for layer in range(12) if MTA(tiny(attention='mta').validate(), layer).conv] == [2, 6, 10]

def test_mta_blocks_have_the_same_gradients():
    mta = shake(MTA(tiny(attention='mta').validate(), 2).double(), 0.3)
    mta.kernel_pre.data += 0.1 * randn(*mta.kernel_pre.shape)
    grads = []
    for block, lean in ((128, False), (5, True), (5, False)):
        mta.lean = lean
        q, k, v = (randn(2, 23, 4, 8, seed=s).requires_grad_() for s in (1, 2, 3))
        mta.zero_grad()
        (mta(q, k, v, block=block) * randn(2, 23, 4, 8, seed=9)).sum().backward()
        grads.append([q.grad, k.grad, v.grad, *(p.grad.clone() for p in mta.parameters())])
    for other in grads[1:]:
        assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(grads[0], other))

@pytest.mark.parametrize('attention, coupling', EVERY)
def test_fused_and_lean_paths_equal_the_explicit_one(attention, coupling):
    x, y = tokens(), tokens(seed=1)
    for kw in (dict(), dict(n_kv_head=2, pos='rope', qk_norm=True)):
        results = []
        for flash, lean in ((False, False), (True, True), (True, False)):
            model = shake(GPT(tiny(attention=attention, coupling=coupling, flash=flash, lean=lean, **kw)))
            logits, loss = model(x, y)
            loss.backward()
            with torch.autocast('cpu', torch.bfloat16):
                half = model(x, y)[0].float()
            results.append((logits, torch.cat([p.grad.flatten() for p in model.parameters()]), half))
        for logits, grad, half in results[1:]:
            assert torch.allclose(logits, results[0][0], atol=2e-5)
            assert (grad - results[0][1]).norm() < 1e-4 * results[0][1].norm()
            assert (half - results[0][0]).abs().max() < 0.1 * results[0][0].abs().max()  # bf16 has 8 bits

@pytest.mark.parametrize('attention', ATTENTIONS)
def test_grouped_queries_equal_repeated_heads(attention):
    """A model whose key and value heads are copies within each group is the grouped-query model."""
    for coupling in ('none', 'alternating'):
        grouped = shake(GPT(tiny(attention=attention, coupling='none', n_kv_head=2)))
        whole = shake(GPT(tiny(attention=attention, coupling='none')))
        assert grouped.config.n_kv_head == 2 and GPT(tiny(n_kv_head=4)).config == GPT(tiny()).config
        state = grouped.state_dict()
        for name, w in state.items():
            if name.endswith(('c_k.weight', 'c_v.weight')):               # (2 * 8, 32) -> (4 * 8, 32)
                state[name] = w.view(2, 8, 32).repeat_interleave(2, dim=0).view(32, 32)
        whole.load_state_dict(state)
        assert torch.allclose(grouped(tokens(), tokens())[0], whole(tokens(), tokens())[0], atol=1e-5)

@pytest.mark.parametrize('attention', ATTENTIONS)
def test_rope_scores_depend_on_distance_only(attention):
    """Shifting all positions by 3 leaves rope's outputs as they are."""
    model = GPT(tiny(attention=attention, pos='rope')).double()
    x = tokens(1, 10)
    y = model(x, x)[0]
    model.cos, model.sin = model.cos[3:], model.sin[3:]
    assert torch.allclose(model(x, x)[0], y, atol=1e-6)                   # the rotation table is float32
    model.cos = model.cos.roll(1, 0)
    assert not torch.allclose(model(x, x)[0], y, atol=1e-4)

# ----------------------------------------------------------------------------------------------------------------------
# the whole model

@pytest.mark.parametrize('attention, coupling', EVERY)
@torch.no_grad()
def test_no_leak_of_the_future(attention, coupling):
    x = tokens(1, 24)
    for qk_norm, pos, flash in itertools.product((False, True), ('learned', 'rope'), (True, False)):
        model = shake(GPT(tiny(attention=attention, coupling=coupling, qk_norm=qk_norm, pos=pos, flash=flash)))
        before = model(x, x)[0]
        for t in (0, 11, 22):
            changed = x.clone()
            changed[:, t + 1:] = (changed[:, t + 1:] + 7) % 61
            after = model(changed, x)[0]
            assert torch.equal(before[:, :t + 1], after[:, :t + 1])
            assert not torch.equal(before[:, t + 1:], after[:, t + 1:])

@torch.no_grad()
def test_no_leak_across_mta_blocks():
    model = shake(GPT(tiny(attention='mta', block_size=300, n_pos=300)))
    x = tokens(1, 300)
    before = model(x, x)[0]
    for t in (126, 127, 128, 260):
        changed = x.clone()
        changed[:, t + 1:] = (changed[:, t + 1:] + 7) % 61
        assert torch.equal(before[:, :t + 1], model(changed, x)[0][:, :t + 1])

@pytest.mark.parametrize('attention, coupling', EVERY)
def test_every_parameter_gets_a_gradient(attention, coupling):
    model = shake(GPT(tiny(attention=attention, coupling=coupling, qk_norm=True)))
    model(tokens(), tokens(seed=1))[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name

@pytest.mark.parametrize('attention, coupling', EVERY)
@torch.no_grad()
def test_decoding_with_a_cache(attention, coupling):
    for kw in (dict(), dict(n_kv_head=2, pos='rope', qk_norm=True)):
        model = shake(GPT(tiny(attention=attention, coupling=coupling, **kw))).eval()
        prompt = tokens(2, 5)
        out = model.generate(prompt, 25, temperature=0)                   # 30 tokens: past block_size=24
        assert torch.equal(out, model.generate(prompt, 25, temperature=0, use_cache=False))
        for t in range(5, 30):                                            # and both equal the plain definition
            assert torch.equal(model(out[:, max(0, t - 24):t])[0][:, -1].argmax(-1), out[:, t])
        sampled = [model.generate(prompt, 12, top_k=5, seed=s, use_cache=c) for s, c in ((1, True), (1, False), (2, True))]
        assert torch.equal(sampled[0], sampled[1]) and not torch.equal(sampled[0], sampled[2])

@pytest.mark.parametrize('attention', ATTENTIONS)
@torch.no_grad()
def test_cached_logits_equal_uncached(attention):
    from model import KVCache
    model = shake(GPT(tiny(attention=attention, coupling='alternating'))).double().eval()
    x = tokens()
    whole = model.trunk(x)
    for pieces in ((24,), (1,) * 24, (7, 1, 1, 9, 6)):
        caches = [KVCache(24) for _ in range(3)]
        parts = [model.trunk(part, caches) for part in x.split(pieces, dim=1)]
        assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-10)

def test_top_k_one_is_greedy():
    model = GPT(tiny())
    assert torch.equal(model.generate(tokens(2, 3), 6, top_k=1), model.generate(tokens(2, 3), 6, temperature=0))

@pytest.mark.parametrize('attention, coupling', EVERY)
def test_flops_against_torch(attention, coupling):
    for kw in (dict(), dict(n_kv_head=2)):
        rounds = min(2, COUPLINGS[coupling].max_rounds) if coupling != 'none' else 1
        model = GPT(tiny(attention=attention, coupling=coupling, flash=False, lean=False, coupling_rounds=rounds, **kw))
        with FlopCounterMode(display=False) as counter:
            loss = model(tokens(), tokens())[1]
        forward = counter.get_total_flops()
        assert 3 * forward == model.estimate_flops() * 48                 # 2 x 24 tokens
        if attention != 'mta':  # torch's counter takes a grouped convolution's weight gradient for a dense one
            with FlopCounterMode(display=False) as counter:
                loss.backward()
            assert 2 * forward == counter.get_total_flops()

def test_flops_by_hand():
    # 60M: every weight but the position table is used once a token; scores: 8 layers x 4 x 512 x 512 tokens
    model = GPT(GPTConfig(n_layer=2, vocab_size=100))
    weights = 100 * 512 + 2 * (4 * 512 ** 2 + 3 * 512 * 2048)
    assert model.estimate_flops() == 6 * weights + 3 * 2 * 4 * 512 * 512

def test_chunked_loss_equals_plain():
    for kw in (dict(), dict(attention='diff', coupling='alternating')):
        x, y = tokens(), tokens(seed=1)
        y[0, :7] = -1                                                     # not scored
        model = shake(GPT(tiny(**kw)))
        logits, loss = model(x, y)
        picked = logits.log_softmax(-1).gather(2, y.clamp(min=0)[..., None])[..., 0]
        assert loss.item() == pytest.approx(-(picked * (y >= 0)).sum().item() / (y >= 0).sum().item(), abs=1e-5)
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        for chunk in (1, 7, 48, 1000):
            model.zero_grad()
            none, chunked = model(x, y, loss_chunk=chunk)
            chunked.backward()
            assert none is None and chunked.item() == pytest.approx(loss.item(), abs=1e-5)
            assert all(torch.allclose(p.grad, g, atol=1e-6) for p, g in zip(model.parameters(), grads))

def test_initial_loss_is_uniform():
    model = GPT(tiny(vocab_size=1000))
    loss = model(tokens(vocab=1000), tokens(seed=1, vocab=1000))[1].item()
    assert loss == pytest.approx(math.log(1000), abs=0.2)

@pytest.mark.parametrize('attention', ATTENTIONS)
def test_attention_maps(attention):
    model = GPT(tiny(attention=attention))
    maps = model.attention_maps(tokens())
    assert len(maps) == 3 and maps[0].shape == (2, 2 if attention == 'diff' else 1, 4, 24, 24)
    for a in maps:
        assert torch.allclose(a.sum(-1), torch.ones(a.shape[:-1]), atol=1e-5) and a.triu(1).abs().max() == 0

def test_lean_keeps_less_for_backward():
    """Bytes kept by one layer's coupling and MLP, counted by hand: q', k' and gate, up; nothing of width 2d or d."""
    def kept(module, *inputs):
        storages = {}
        own = {p.untyped_storage().data_ptr() for p in module.parameters()}
        def pack(t):
            if t.untyped_storage().data_ptr() not in own:
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = module(*inputs)
        return sum(storages.values()), out
    config = tiny(coupling='alternating').validate()
    q, k = (torch.zeros(2, 24, 4, 8, requires_grad=True) for _ in range(2))
    assert kept(Coupling(config), q, k)[0] == 2 * q.nbytes
    from model import MLP
    x = torch.zeros(2, 24, 32, requires_grad=True)
    assert kept(MLP(config), x)[0] == x.nbytes + 2 * 4 * x.nbytes

@pytest.mark.skipif(not shutil.which('g++'), reason='torch.compile needs a C++ compiler on a CPU')
@pytest.mark.parametrize('attention, coupling', [('standard', 'none'), ('standard', 'alternating'),
                                                 ('diff', 'alternating'), ('mta', 'alternating')])
def test_compiles_to_one_graph(attention, coupling):
    torch._dynamo.reset()
    model = shake(GPT(tiny(attention=attention, coupling=coupling, n_layer=3, qk_norm=True, pos='rope')))
    x, y = tokens(), tokens(seed=1)
    loss = model(x, y)[1]
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True)(x, y)[1]
    compiled.backward()
    assert compiled.item() == pytest.approx(loss.item(), abs=1e-5)
    assert all(torch.allclose(p.grad, g, atol=1e-5) for p, g in zip(model.parameters(), grads))

@pytest.mark.parametrize('bad, words', [
    (dict(n_embd=30), ['n_embd=30', 'n_head=4']),
    (dict(n_kv_head=3), ['n_kv_head=3', 'n_head=4']),
    (dict(attention='dif'), ["attention='dif'", 'diff']),
    (dict(coupling='affine'), ["coupling='affine'", 'alternating']),
    (dict(block_size=33), ['block_size=33', 'n_pos=32']),
    (dict(dropout=1.0), ['dropout=1.0']),
    (dict(n_layer=0), ['n_layer=0']),
    (dict(coupling_rounds=2), ['coupling_rounds=2', 'none']),
    (dict(coupling='cross_mlp', coupling_rounds=2), ['coupling_rounds=2', 'cross_mlp']),
    (dict(coupling='euler', coupling_rounds=8), ['coupling_rounds=8', 'euler']),
    (dict(attention='diff', pos='rope', n_embd=24), ['n_embd=24', 'diff', 'rope']),
    (dict(pos='alibi'), ["pos='alibi'", 'rope']),
], ids=str)
def test_config_refusals_name_key_and_value(bad, words):
    with pytest.raises(ValueError) as error:
        GPT(tiny(**bad))
    assert all(word in str(error.value) for word in words)

def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match='25 tokens is longer than block_size=24'):
        GPT(tiny())(tokens(1, 25))
