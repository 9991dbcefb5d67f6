"""
A GPT whose queries and keys meet before they are scored. The whole model is in this file:

  configuration -> couplings -> scoring methods -> attention -> block -> GPT

Inside a layer the data flows one way: x -> project -> couple -> QK-norm -> RoPE -> score -> y.
- A coupling is a module (q, k) -> (q, k) that mixes one token's OWN q and k. Nothing moves between positions, so it
  is causal and its keys can be cached. The one of the paper is `Alternating`; the others are its controls.
- A scoring method is a module (q, k, v) -> y: softmax attention, Differential Attention or Multi-Token Attention.
To add either: write one class, add one line to COUPLINGS or ATTENTIONS.

Sources, cited by their short names below:
  [v2]   Invertible Query-Key Coupling Composes with Attention Mechanisms, ACML 2026 (later version of arXiv 2604.01683)
  [v1]   Coupled Query-Key Dynamics for Attention, arXiv 2604.01683v1
  [diff] Differential Transformer, Ye et al. 2024, arXiv 2410.05258
  [mta]  Multi-Token Attention, Golovneva et al. 2025, arXiv 2504.00927
"Ours" marks a choice that no paper fixes. Shapes: B batch, T tokens, H query heads, K key/value heads, d head width.
"""
import hashlib
import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# ----------------------------------------------------------------------------------------------------------------------
# configuration

@dataclass
class GPTConfig:
    block_size: int = 512         # tokens in a training window, and the longest context of generate()
    vocab_size: int = 50257       # GPT-2 BPE
    n_layer: int = 8              # the defaults are the 60M model of [v2]
    n_head: int = 8
    n_kv_head: int = 0            # key/value heads; 0: as many as n_head; fewer: grouped-query attention ([v2] uses 1/4)
    n_embd: int = 512
    d_ff: int = 0                 # width of the SwiGLU; 0: 4 * n_embd
    dropout: float = 0.0          # on embeddings, attention maps and residual branches
    pos: str = 'learned'          # learned (a table of n_pos rows) | rope
    n_pos: int = 2048             # rows of the learned table, whatever block_size is: [v2]'s counts include 2048
    attention: str = 'standard'   # standard | diff | mta
    qk_norm: bool = False         # RMSNorm of each head's q and k, after the coupling and before RoPE
    coupling: str = 'none'        # none | a key of COUPLINGS
    coupling_rounds: int = 1      # how often the coupling is applied
    flash: bool = True            # False: attention by explicit T x T softmax maps
    lean: bool = True             # recompute cheap intermediates in backward; False: plain autograd, which second
                                  # derivatives, torch.func and hooks on the coupling's nets and mlp.c_proj need

    @property
    def d_head(self):
        return self.n_embd // self.n_head

    def validate(self):
        """Fill in the derived sizes; raise ValueError naming the key, its value and what was expected."""
        def need(ok, key, expected):
            if not ok:
                raise ValueError(f'{key}={getattr(self, key)!r}: expected {expected}')
        for key in ('block_size', 'vocab_size', 'n_layer', 'n_head', 'n_embd', 'n_pos', 'coupling_rounds'):
            need(type(getattr(self, key)) is int and getattr(self, key) > 0, key, 'a positive integer')
        for key in ('n_kv_head', 'd_ff'):
            need(type(getattr(self, key)) is int and getattr(self, key) >= 0, key, 'a positive integer, or 0 for the default')
        for key in ('qk_norm', 'flash', 'lean'):
            need(type(getattr(self, key)) is bool, key, 'True or False')
        self.n_kv_head = self.n_kv_head or self.n_head
        self.d_ff = self.d_ff or 4 * self.n_embd
        need(isinstance(self.dropout, (int, float)) and 0 <= self.dropout < 1, 'dropout', 'a number in [0, 1)')
        need(self.n_embd % self.n_head == 0, 'n_embd', f'a multiple of n_head={self.n_head}')
        need(self.n_head % self.n_kv_head == 0, 'n_kv_head', f'a divisor of n_head={self.n_head}')
        need(self.pos in ('learned', 'rope'), 'pos', 'learned or rope')
        need(self.attention in ATTENTIONS, 'attention', 'one of ' + ', '.join(ATTENTIONS))
        need(self.coupling == 'none' or self.coupling in COUPLINGS, 'coupling', 'one of none, ' + ', '.join(COUPLINGS))
        need(self.pos == 'rope' or self.block_size <= self.n_pos, 'block_size',
             f'at most n_pos={self.n_pos}, the rows of the learned position table (or pos=rope)')
        parts = ATTENTIONS[self.attention].n_maps * (2 if self.pos == 'rope' else 1)
        need(self.d_head % parts == 0, 'n_embd', f'a head width n_embd/n_head divisible by {parts} for '
             f'attention={self.attention} with pos={self.pos} (it is {self.d_head})')
        need(self.d_head > 1 or self.coupling != 'independent', 'n_embd', 'heads wider than 1 for coupling=independent')
        rounds = getattr(COUPLINGS.get(self.coupling), 'max_rounds', 1)
        need(self.coupling_rounds <= rounds, 'coupling_rounds', f'at most {rounds} for coupling={self.coupling}')
        return self

# the sizes of [v2]; heads are 64 wide
SIZES = {
    'tiny': dict(n_layer=6, n_head=4, n_embd=256),     # about 6M without embeddings; the MQAR model
    '60m': dict(n_layer=8, n_head=8, n_embd=512),      # 60,343,296 parameters
    '150m': dict(n_layer=12, n_head=12, n_embd=768),   # 153,435,648
    '455m': dict(n_layer=24, n_head=16, n_embd=1024),  # 456,263,680
}

# ----------------------------------------------------------------------------------------------------------------------
# couplings: (q, k) -> (q, k), with q (B, T, H, d) and k (B, T, K, d)
#
# All nets are shared by the heads of a layer and applied per head. With grouped queries (K < H), which no source
# composes with coupling, a k-head reads the mean of its group's queries and a q-head reads its group's key (ours).

CLAMP = 3.0  # log-scales stay in [-3, 3] [v2]

def to_q_heads(x, n_head):
    """(B, T, K, d) -> (B, T, H, d): each query head gets its group's row."""
    return x if x.size(2) == n_head else x.repeat_interleave(n_head // x.size(2), dim=2)

def to_k_heads(x, n_kv_head):
    """(B, T, H, d) -> (B, T, K, d): each key head gets the mean of its group's query heads."""
    return x if x.size(2) == n_kv_head else x.unflatten(2, (n_kv_head, -1)).mean(3)

def full(x):
    """float32 at least: exp and clamp are done in full precision under autocast."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

def affine(z, s, t):
    """z exp(s) + t"""
    return torch.addcmul(t, full(z), s.exp()).type_as(z)

def affine_inverse(z, s, t):
    return ((full(z) - t) * (-s).exp()).type_as(z)

class Net(nn.Module):
    """Linear -> SiLU -> Linear on the last dimension, applied to `uses` heads of a token.

    The output layer starts at zero (`zero=True`), so that the coupling starts as the identity.
    """
    def __init__(self, d_in, d_hidden, d_out, uses, bias=False, zero=True):
        super().__init__()
        self.hidden = nn.Linear(d_in, d_hidden, bias=False)
        self.out = nn.Linear(d_hidden, d_out, bias=bias)
        self.out.zero = zero  # tells GPT.init_weights to leave it so
        if zero:
            nn.init.zeros_(self.out.weight)
        if bias:
            nn.init.zeros_(self.out.bias)
        self.hidden.uses = self.out.uses = uses

    def forward(self, x):
        return self.out(F.silu(self.hidden(x)))

class AffineNet(Net):
    """The conditioning net of [v2]: c -> (log-scale s, shift t), each as wide as c; s is clamped to [-3, 3]."""
    def __init__(self, d, uses):
        super().__init__(d, d, 2 * d, uses, bias=True)

    def forward(self, c):
        s, t = full(super().forward(c)).chunk(2, dim=-1)
        return s.clamp(-CLAMP, CLAMP), t

class Alternating(nn.Module):
    """The coupling of [v2], after RealNVP: q' = q exp(s1(k)) + t1(k), then k' = k exp(s2(q')) + t2(q').

    The second half reads the UPDATED first half, so the map is undone by running it backwards: `inverse`.
    """
    max_rounds = 16  # each with nets of its own

    def __init__(self, config):
        super().__init__()
        self.lean = config.lean
        self.net_q = AffineNet(config.d_head, config.n_kv_head)  # reads k, moves q
        self.net_k = AffineNet(config.d_head, config.n_kv_head)  # reads q, moves k

    def forward(self, q, k):
        if not self.lean or not torch.is_grad_enabled():
            return self.couple(q, k)
        if torch.compiler.is_compiling():  # the compiler fuses by itself, but would keep what the nets compute
            return checkpoint(self.couple, q, k, use_reentrant=False, preserve_rng_state=False)
        n1, n2 = self.net_q, self.net_k
        return LeanAlternating.apply(q, k, n1.hidden.weight, n1.out.weight, n1.out.bias,
                                     n2.hidden.weight, n2.out.weight, n2.out.bias)

    def couple(self, q, k):
        """The map in plain operations."""
        q = affine(q, *(to_q_heads(x, q.size(2)) for x in self.net_q(k)))
        k = affine(k, *self.net_k(to_k_heads(q, k.size(2))))
        return q, k

    def inverse(self, q, k):
        k = affine_inverse(k, *self.net_k(to_k_heads(q, k.size(2))))
        q = affine_inverse(q, *(to_q_heads(x, q.size(2)) for x in self.net_q(k)))
        return q, k

class LeanAlternating(torch.autograd.Function):
    """`Alternating` that keeps only its outputs, which attention keeps anyway, and recomputes the nets in backward.

    q is not needed, since d loss/d s1 = dq' * q exp(s1) = dq' * (q' - t1). k comes back by the inverse map, or is kept
    where that would lose precision.
    """
    @staticmethod
    def pieces(*tensors):
        """Views (B, n, H, d): some tokens at a time on a CPU, so that the nets' work stays in its cache (2048 rows: ours)."""
        B, T, H, _ = tensors[0].shape
        n = max(1, 2048 // max(1, B * H)) if tensors[0].device.type == 'cpu' else T
        return zip(*(x.split(n, dim=1) for x in tensors))

    @staticmethod
    def invertible(k, k_new, e):
        """k = (k' - t) / exp(s) is as wrong as the rounding of k' / exp(s): at most 64 ulp of k, and not in bfloat16.
        Only on a CPU: looking at the numbers would stall a GPU (ours)."""
        if k.device.type != 'cpu' or k.element_size() < 4 or not k.numel():
            return False
        return bool((k_new / e).abs().max() < 64 * k.abs().max())

    @staticmethod
    def net(c, w1, w2, b):
        """AffineNet on c (B, T, K, d): hidden before and after SiLU, log-scale before the clamp, scale, shift."""
        h = F.linear(c, w1.type_as(c))
        a = F.silu(h)
        s, t = full(F.linear(a, w2.type_as(c), b.type_as(c))).chunk(2, dim=-1)
        return h, a, s, s.clamp(-CLAMP, CLAMP).exp_(), t

    @staticmethod
    def net_backward(c, h, a, s, ds, dt, w1, w2):
        """Gradients of c and of the parameters from those of log-scale and shift."""
        dout = c.new_empty(*c.shape[:-1], 2 * c.size(-1))                 # (B, T, K, 2d)
        dout[..., :c.size(-1)] = torch.ops.aten.hardtanh_backward(ds, s, -CLAMP, CLAMP)
        dout[..., c.size(-1):] = dt
        dh = torch.ops.aten.silu_backward(dout @ w2.type_as(c), h)
        flat = lambda x: x.flatten(0, -2)                                 # (B*T*K, .)
        return full(dh @ w1.type_as(c)), flat(dh).t() @ flat(c), flat(dout).t() @ flat(a), flat(dout).sum(0)

    @staticmethod
    def forward(ctx, q, k, w1, w2, b1, u1, u2, b2):
        q_new, k_new = torch.empty_like(q), torch.empty_like(k)
        keep_k = False
        for q_i, k_i, q_out, k_out in LeanAlternating.pieces(q, k, q_new, k_new):
            e, t = (to_q_heads(x, q.size(2)) for x in LeanAlternating.net(k_i, w1, w2, b1)[-2:])
            q_out.copy_(torch.addcmul(t, full(q_i), e))
            e, t = LeanAlternating.net(to_k_heads(q_out, k.size(2)), u1, u2, b2)[-2:]
            k_out.copy_(torch.addcmul(t, full(k_i), e))
            keep_k = keep_k or not LeanAlternating.invertible(k_i, k_out, e)
        ctx.save_for_backward(q_new, k_new, k if keep_k else None, w1, w2, b1, u1, u2, b2)
        return q_new, k_new

    @staticmethod
    @once_differentiable
    def backward(ctx, dq_new, dk_new):
        q_new, k_new, k_kept, w1, w2, b1, u1, u2, b2 = ctx.saved_tensors
        n_head, n_kv_head = q_new.size(2), k_new.size(2)
        dq_all, dk_all, grads = torch.empty_like(q_new), torch.empty_like(k_new), None
        whole = (q_new, k_new, k_new if k_kept is None else k_kept, dq_new, dk_new, dq_all, dk_all)
        for q_new, k_new, k, dq, dk, dq_out, dk_out in LeanAlternating.pieces(*whole):
            dq, dk = full(dq), full(dk)
            # k' = k exp(s) + t, with (s, t) read from q'
            c = to_k_heads(q_new, n_kv_head)
            h, a, s, e, t = LeanAlternating.net(c, u1, u2, b2)
            scaled = full(k_new) - t if k_kept is None else full(k) * e   # k exp(s)
            k = (scaled / e).type_as(k_new) if k_kept is None else k
            dc, du1, du2, db2 = LeanAlternating.net_backward(c, h, a, s, dk * scaled, dk, u1, u2)
            dq = dq + to_q_heads(dc, n_head) / (n_head // n_kv_head)
            dk = dk * e
            # q' = q exp(s) + t, with (s, t) read from k
            h, a, s, e, t = LeanAlternating.net(k, w1, w2, b1)
            ds, dt = dq * (full(q_new) - to_q_heads(t, n_head)), dq
            if n_head != n_kv_head:  # a key's s and t served its whole group
                ds, dt = (x.unflatten(2, (n_kv_head, -1)).sum(3) for x in (ds, dt))  # (B, n, K, d)
            dc, dw1, dw2, db1 = LeanAlternating.net_backward(k, h, a, s, ds, dt, w1, w2)
            dq_out.copy_(dq * to_q_heads(e, n_head))
            dk_out.copy_(dk + dc)
            new = [full(x) for x in (dw1, dw2, db1, du1, du2, db2)]       # summed in full precision
            grads = new if grads is None else [x + y for x, y in zip(grads, new)]
        return dq_all, dk_all, *grads

class Simultaneous(Alternating):
    """Control of [v2]: as alternating, but both halves read the ORIGINAL q and k. Not invertible in general."""
    inverse = None

    def forward(self, q, k):
        return (affine(q, *(to_q_heads(x, q.size(2)) for x in self.net_q(k))),
                affine(k, *self.net_k(to_k_heads(q, k.size(2)))))

class OneWay(nn.Module):
    """[v2] q' = q exp(a_h) + f(k), k' = k; a_h one log-scale a head, f two-layer (ours)."""
    max_rounds = 16  # each with a net of its own

    def __init__(self, config):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(config.n_head))
        self.net = Net(config.d_head, config.d_head, config.d_head, config.n_kv_head)

    def scale_and_shift(self, k):
        return full(self.log_scale)[:, None], full(to_q_heads(self.net(k), len(self.log_scale)))

    def forward(self, q, k):
        return affine(q, *self.scale_and_shift(k)), k

    def inverse(self, q, k):
        return affine_inverse(q, *self.scale_and_shift(k)), k

class CrossMLP(nn.Module):
    """Control of [v2]: (q', k') = (q, k) + MLP([q; k]); a key head takes the mean of its group's updates (ours)."""
    def __init__(self, config):
        super().__init__()
        d = config.d_head
        self.net = Net(2 * d, 2 * d, 2 * d, config.n_head)

    def forward(self, q, k):
        dq, dk = self.net(torch.cat([q, to_q_heads(k, q.size(2))], dim=-1)).chunk(2, dim=-1)
        return q + dq, k + to_k_heads(dk, k.size(2))

class LinearMix(nn.Module):
    """Control of [v2]: [q'; k'] = M_h [q; k], one 2d x 2d matrix a head. Stored as M_h - I, which starts at zero (ours)."""
    def __init__(self, config):
        super().__init__()
        self.mix = nn.Parameter(torch.zeros(config.n_head, 2 * config.d_head, 2 * config.d_head))

    def forward(self, q, k):
        qk = torch.cat([q, to_q_heads(k, q.size(2))], dim=-1)             # (B, T, H, 2d)
        dq, dk = torch.einsum('hij,bthj->bthi', self.mix, qk).chunk(2, dim=-1)
        return q + dq.type_as(q), k + to_k_heads(dk, k.size(2)).type_as(k)

class Independent(nn.Module):
    """Control of [v2]: q' = q + f(q), k' = k + g(k); two-layer, hidden d // 2: capacity without interaction."""
    def __init__(self, config):
        super().__init__()
        d = config.d_head
        self.net_q = Net(d, d // 2, d, config.n_head)
        self.net_k = Net(d, d // 2, d, config.n_kv_head)

    def forward(self, q, k):
        return q + self.net_q(q), k + self.net_k(k)

class Euler(nn.Module):
    """[v1] n steps of q += dt_h k; k += dt_h f(q), both from the step's start. dt_h starts at 0.1 (ours), one a head;
    a key head takes the mean of its group's (ours). The steps share f (two-layer, hidden d, no bias).

    Not the identity at initialization, as in [v1].
    """
    max_rounds = 7

    def __init__(self, config):
        super().__init__()
        self.n_kv_head = config.n_kv_head
        self.dt = nn.Parameter(torch.full((config.n_head,), 0.1))
        self.net = Net(config.d_head, config.d_head, config.d_head, self.net_uses(config) * config.coupling_rounds, zero=False)

    def net_uses(self, config):
        """Heads of a token that f is applied to in a step."""
        return config.n_kv_head

    def steps(self):
        dt = self.dt[None, None, :, None]                                 # (1, 1, H, 1)
        return dt, to_k_heads(dt, self.n_kv_head)                         # and (1, 1, K, 1)

    def force(self, q):
        return self.net(to_k_heads(q, self.n_kv_head))                    # (B, T, K, d)

    def forward(self, q, k):
        dt_q, dt_k = self.steps()
        return (q + dt_q * to_q_heads(k, q.size(2))).type_as(q), (k + dt_k * self.force(q)).type_as(k)

class Leapfrog(Euler):
    """[v1] n steps of k += dt/2 f(q); q += dt k; k += dt/2 f(q): symplectic, and undone by the steps in reverse."""
    def net_uses(self, config):
        return 2 * config.n_kv_head

    def forward(self, q, k, sign=1):
        dt_q, dt_k = self.steps()
        k = (k + sign * dt_k / 2 * self.force(q)).type_as(k)
        q = (q + sign * dt_q * to_q_heads(k, q.size(2))).type_as(q)
        k = (k + sign * dt_k / 2 * self.force(q)).type_as(k)
        return q, k

    def inverse(self, q, k):
        return self.forward(q, k, sign=-1)

class MLPOnly(Euler):
    """Control of [v1]: q += dt_h f(q), k untouched: the capacity of euler without the coupling."""
    def net_uses(self, config):
        return config.n_head

    def forward(self, q, k):
        return (q + self.steps()[0] * self.net(q)).type_as(q), k

COUPLINGS = {
    'one_way': OneWay, 'alternating': Alternating, 'simultaneous': Simultaneous, 'cross_mlp': CrossMLP,
    'linear_mix': LinearMix, 'independent': Independent, 'euler': Euler, 'leapfrog': Leapfrog, 'mlp_only': MLPOnly,
}

class Coupling(nn.Module):
    """`coupling_rounds` rounds of one coupling: fresh nets a round, or one net for all steps of [v1]'s integrators."""
    def __init__(self, config):
        super().__init__()
        cls, self.rounds = COUPLINGS[config.coupling], config.coupling_rounds
        self.nets = nn.ModuleList(cls(config) for _ in range(1 if issubclass(cls, Euler) else self.rounds))

    def forward(self, q, k):
        for i in range(self.rounds):
            q, k = self.nets[i % len(self.nets)](q, k)
        return q, k

    def inverse(self, q, k):
        if getattr(self.nets[0], 'inverse', None) is None:
            raise NotImplementedError(f'{type(self.nets[0]).__name__} has no inverse')
        for i in reversed(range(self.rounds)):
            q, k = self.nets[i % len(self.nets)].inverse(q, k)
        return q, k

# ----------------------------------------------------------------------------------------------------------------------
# scoring methods: (q, k, v) -> y, with q, y (B, T, H, d) and k, v (B, S, K, d), S >= T: the queries are the LAST T of
# the S positions, so that one token can be scored against a cache. All are causal.

def future(T, S, device):
    """(T, S) bool: True where key j lies in the future of query i."""
    return torch.ones(T, S, dtype=torch.bool, device=device).triu(S - T + 1)

def sdpa(q, k, v, dropout, scale=None):
    """Causal softmax attention by a fused kernel; shapes as above, the softmax maps are never stored."""
    T, S = q.size(1), k.size(1)
    mask = None if T in (1, S) else ~future(T, S, q.device)
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
                                       dropout_p=dropout, is_causal=mask is None and T > 1, scale=scale,
                                       enable_gqa=q.size(2) != k.size(2))
    return y.transpose(1, 2)

def softmax_map(q, k):
    """The same map written out: (B, T, H, d), (B, S, K, d) -> (B, H, T, S), in float32 at least."""
    k = to_q_heads(k, q.size(2))
    scores = full(q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) / math.sqrt(q.size(-1))
    return scores.masked_fill(future(q.size(1), k.size(1), q.device), -math.inf).softmax(dim=-1)

def apply_map(a, v):
    """(B, H, T, S), (B, S, K, d) -> (B, T, H, d): weighted sums of the values."""
    return (a.type_as(v) @ to_q_heads(v, a.size(1)).transpose(1, 2)).transpose(1, 2)

class Standard(nn.Module):
    """softmax(q k^T / sqrt(d)) v. The base of the other methods.

    If `maps` is a list, the softmax maps (B, n_maps, H, T, S) are appended to it, and the path is the explicit one.
    """
    n_maps = 1    # softmax maps a head; q and k are split into as many parts
    lookback = 0  # earlier queries that a query's output depends on

    def __init__(self, config, layer):
        super().__init__()
        self.flash, self.lean, self.dropout = config.flash, config.lean, config.dropout

    def p(self):
        return self.dropout if self.training else 0.0

    def recomputes(self, q, k):
        """Does forward itself save memory for backward? Then it needs no checkpoint around it."""
        return False

    def forward(self, q, k, v, maps=None):
        if self.flash and maps is None:
            return sdpa(q, k, v, self.p())
        a = softmax_map(q, k)
        if maps is not None:
            maps.append(a[:, None])
        return apply_map(F.dropout(a, self.p()), v)

    @staticmethod
    def flops(config, layer):
        """FLOPs of a query against one key, all heads, forward: scores and weighted values."""
        return 2 * 2 * config.n_embd

class Diff(Standard):
    """[diff]: softmax(q1 k1^T / sqrt(d/2)) v - lambda_h softmax(q2 k2^T / sqrt(d/2)) v, where q1, q2 are the halves of
    a head's q (k likewise); then RMSNorm of each head without weights, times 1 - lambda_init.

    lambda_h is one scalar a head and layer, as [v2]'s parameter count fixes; the official code has four vectors a
    layer. It starts at lambda_init = 0.8 - 0.6 exp(-0.3 layer), layer counted from 0 (ours).
    """
    n_maps = 2

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.lam = nn.Parameter(torch.full((config.n_head,), self.lambda_init))

    def recomputes(self, q, k):
        return (self.lean and self.flash and self.p() == 0 and q.device.type == 'cpu' and q.element_size() >= 4
                and q.size(1) == k.size(1) and not torch.compiler.is_compiling())

    def forward(self, q, k, v, maps=None):
        d = q.size(-1) // 2
        if maps is None and self.recomputes(q, k):
            y = LeanDiff.apply(q, k, v, self.lam)
        elif self.flash and maps is None:
            # Flash kernels want q, k and v equally wide. (q1, 0) . (k1, k2) = q1 . k1: only q needs zeros, k stays.
            first = torch.arange(2 * d, device=q.device) < d
            y1, y2 = (sdpa(q * half, k, v, self.p(), scale=d ** -0.5) for half in (first, ~first))
            y = y1 - self.lam[:, None].type_as(y1) * y2
        else:
            a1, a2 = (softmax_map(q_half, k_half) for q_half, k_half in zip(q.split(d, -1), k.split(d, -1)))
            if maps is not None:
                maps.append(torch.stack([a1, a2], dim=1))
            y = apply_map(F.dropout(a1, self.p()) - self.lam[:, None, None] * F.dropout(a2, self.p()), v)
        return rms_norm(y, y.new_ones(2 * d), self.lean) * (1 - self.lambda_init)

    # flops: as standard, since two score maps of half the width cost one, and their difference is applied once

class LeanDiff(torch.autograd.Function):
    """The difference of diff's maps times the values, q (B, T, H, d) and k, v (B, T, K, d) -> (B, T, H, d), on a CPU.

    Works on blocks of queries, where one product (A1 - lambda A2) v serves both maps; a fused kernel must be called for
    each, at full width. Keeps q, k and v only: the maps are made again in backward.
    """
    @staticmethod
    def split(q, k, v):
        """Halves of q and k (B, H, 2, T, d/2), q scaled, and v (B, H, T, d)."""
        k, v = (to_q_heads(x, q.size(2)) for x in (k, v))
        q, k = (x.unflatten(-1, (2, -1)).permute(0, 2, 3, 1, 4) for x in (q * (q.size(-1) // 2) ** -0.5, k))
        return q.contiguous(), k.contiguous(), v.transpose(1, 2).contiguous()

    @staticmethod
    def blocks(q, k, lam, block=32):
        """Start and end of each block of queries (32: ours), its maps (B, H, 2, n, end) and A1 - lambda A2 (B, H, n, end)."""
        masked = future(block, block, q.device)
        for i in range(0, q.size(-2), block):
            j = min(q.size(-2), i + block)
            scores = q[..., i:j, :] @ k[..., :j, :].mT
            scores[..., i:].masked_fill_(masked[:j - i, :j - i], -math.inf)
            a = scores.softmax(dim=-1)
            yield i, j, a, torch.addcmul(a[:, :, 0], a[:, :, 1], lam[:, None, None], value=-1)

    @staticmethod
    def forward(ctx, q, k, v, lam):
        ctx.save_for_backward(q, k, v, lam)
        y = torch.empty_like(q)
        q, k, v = LeanDiff.split(q, k, v)
        for i, j, _, a in LeanDiff.blocks(q, k, lam):
            y[:, i:j] = (a @ v[..., :j, :]).transpose(1, 2)               # (B, n, H, d)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        *qkv, lam = ctx.saved_tensors
        n_kv_head = qkv[1].size(2)
        q, k, v = LeanDiff.split(*qkv)
        dy = dy.transpose(1, 2).contiguous()                              # (B, H, T, d)
        dq, dk, dv, dlam = (torch.zeros_like(x) for x in (q, k, v, lam))
        for i, j, maps, a in LeanDiff.blocks(q, k, lam):
            g = dy[..., i:j, :]
            dv[..., :j, :] += a.mT @ g
            ds = maps * (g @ v[..., :j, :].mT)[:, :, None]                # (B, H, 2, n, j), of softmax's backward
            dot = ds.sum(dim=-1, keepdim=True)
            ds.addcmul_(maps, dot, value=-1)
            dq[..., i:j, :] = ds @ k[..., :j, :]
            dk[..., :j, :] += ds.mT @ q[..., i:j, :]
            dlam -= dot[:, :, 1].sum(dim=(0, 2, 3))
        sign = torch.stack([torch.ones_like(lam), -lam], dim=1)[..., None, None]  # (H, 2, 1, 1)
        dq, dk = ((x * sign).permute(0, 3, 1, 2, 4).flatten(-2) for x in (dq, dk))  # (B, T, H, d)
        dv = dv.transpose(1, 2)                                           # (B, T, H, d)
        if n_kv_head != dk.size(2):  # a key served its whole group
            dk, dv = (x.unflatten(2, (n_kv_head, -1)).sum(3) for x in (dk, dv))  # (B, T, K, d)
        return dq * (dq.size(-1) // 2) ** -0.5, dk, dv, dlam

class MTA(Standard):
    """[mta]: scores mix with their neighbours, over queries, keys and heads, before and after the softmax.

    On layers 2, 6, 10, ... (from 0) each head's score map is convolved, causally, with a 6 x 11 kernel over (queries,
    keys); on every layer an H x H matrix mixes the heads' maps; both before the softmax, and again after it; all of
    these start as the identity. Then an RMSNorm of each head with weights, and a sigmoid gate that reads the normed
    head, as in the released code.
    """
    C_Q, C_K = 6, 11  # a query sees scores of its 5 predecessors, and of 5 keys to either side

    def __init__(self, config, layer):
        super().__init__(config, layer)
        H, d = config.n_head, config.d_head
        self.conv = self.has_conv(layer)
        self.lookback = 2 * (self.C_Q - 1) if self.conv else 0  # two convolutions in a row look back 5 queries each
        if self.conv:
            identity = torch.zeros(H, 1, self.C_Q, self.C_K)
            identity[:, :, -1, self.C_K // 2] = 1.0
            self.kernel_pre, self.kernel_post = nn.Parameter(identity.clone()), nn.Parameter(identity.clone())
        self.mix_pre, self.mix_post = nn.Parameter(torch.eye(H)), nn.Parameter(torch.eye(H))
        self.norm = RMSNorm(d, config)
        self.gate = nn.Linear(d, 1)
        self.gate.uses = H

    def recomputes(self, q, k):
        return self.lean and self.flash

    @staticmethod
    def has_conv(layer):
        return layer % 4 == 2

    def convolve(self, x, kernel, masked):
        """(B, H, T, S) -> same: x[i, j] becomes a weighted sum over queries i-5..i and keys j-5..j+5, future left out."""
        x = F.pad(x.masked_fill(masked, 0.0), (self.C_K // 2, self.C_K // 2, self.C_Q - 1, 0))
        return F.conv2d(x, kernel.type_as(x), groups=x.size(1))

    def mix(self, x, matrix):
        """(B, H, T, S) -> same: each head's map becomes a weighted sum of all heads' maps."""
        return (matrix.type_as(x) @ x.flatten(2)).view_as(x)

    def attend(self, q, k, v, skip, maps=None):
        """Outputs of the queries after the first `skip`, which are there as context of the convolutions only."""
        masked = future(q.size(1), k.size(1), q.device)
        q = q / math.sqrt(q.size(-1))
        scores = q.transpose(1, 2) @ to_q_heads(k, q.size(2)).permute(0, 2, 3, 1)  # (B, H, T, S)
        if self.conv:
            scores = self.convolve(scores, self.kernel_pre, masked)
        scores = self.mix(scores, self.mix_pre)
        a = full(scores).masked_fill(masked, -math.inf).softmax(dim=-1).type_as(v)
        if maps is not None:
            maps.append(a[:, None])
        if self.conv:
            a = self.convolve(a, self.kernel_post, masked).masked_fill(masked, 0.0)
        a = self.mix(a[:, :, skip:], self.mix_post)
        return apply_map(F.dropout(a, self.p()), v)

    def forward(self, q, k, v, maps=None, block=128):
        if torch.compiler.is_compiling():  # each block is compiled apart: fewer of them (ours)
            block = min(4 * block, max(block, q.size(1) // 4))
        if not self.flash or maps is not None:
            y = self.attend(q, k, v, 0, maps)
        else:
            # A block of queries at a time, against the keys up to its end, maps recomputed in backward: memory is
            # linear in T, and the keys in the future of a block cost nothing.
            T, S, ys = q.size(1), k.size(1), []
            for i in range(0, T, block):
                start, end = max(0, i - self.lookback), min(T, i + block)
                args = q[:, start:end], k[:, :S - T + end], v[:, :S - T + end], i - start
                if self.lean and torch.is_grad_enabled():
                    ys.append(checkpoint(self.attend, *args, use_reentrant=False, preserve_rng_state=self.dropout > 0))
                else:
                    ys.append(self.attend(*args))
            y = torch.cat(ys, dim=1)
        y = self.norm(y)
        return y * torch.sigmoid(self.gate(y))

    @classmethod
    def flops(cls, config, layer):
        conv = 2 * cls.C_Q * cls.C_K if cls.has_conv(layer) else 0
        return Standard.flops(config, layer) + 2 * config.n_head * (2 * config.n_head + conv)

ATTENTIONS = {'standard': Standard, 'diff': Diff, 'mta': MTA}

# ----------------------------------------------------------------------------------------------------------------------
# attention, block

EPS = 1e-6  # of every RMSNorm (ours)

class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension"""
    def __init__(self, width, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.lean = config.lean

    def forward(self, x):
        return rms_norm(x, self.weight, self.lean)

def rms_norm(x, weight, lean):
    """The same as a function; `lean` keeps less for backward on a CPU."""
    if not lean or x.is_cuda or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight.type_as(x), EPS)        # one kernel on a GPU
    return LeanRMSNorm.apply(x, weight.type_as(x))

class LeanRMSNorm(torch.autograd.Function):
    """RMSNorm that keeps its input only. PyTorch has no fused one on a CPU: its eight ops keep twice as much."""
    @staticmethod
    def forward(ctx, x, w):
        r = torch.rsqrt(torch.linalg.vector_norm(full(x), dim=-1, keepdim=True) ** 2 / x.size(-1) + EPS)
        ctx.save_for_backward(x, w, r)
        return (x * r).mul_(w).type_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w, r = ctx.saved_tensors
        dot = (x * r).mul_(dy)                                            # dy * normalized x
        dx = torch.addcmul((dy * w) * r, full(x), (dot @ full(w))[..., None] * r ** 2, value=-1 / x.size(-1))
        dw = dot.flatten(0, -2).sum(0).type_as(w) if ctx.needs_input_grad[1] else None  # diff's is constant
        return dx.type_as(x), dw

def rope(x, cos, sin):
    """RoFormer's rotation of (B, T, H, d) by position; cos, sin (T, 1, d/2). Feature i is paired with i + d/2."""
    x1, x2 = full(x).chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1).type_as(x)

class KVCache:
    """One layer's past for decoding: keys (already coupled, normed, rotated) and values of up to `size` positions,
    written in place, and the last `lookback` queries, which MTA needs."""
    def __init__(self, size):
        self.size, self.n, self.q, self.k, self.v = size, 0, None, None, None

    def append(self, q, k, v, lookback):
        """Add the new positions' q, k, v; return the queries, keys and values to score, old ones first."""
        if self.k is None:
            self.k, self.v = (x.new_empty(x.size(0), self.size, *x.shape[2:]) for x in (k, v))
            self.q = q[:, :0]
        end = self.n + k.size(1)
        self.k[:, self.n:end], self.v[:, self.n:end] = k, v
        self.n = end
        q = torch.cat([self.q, q], dim=1)
        self.q = q[:, max(0, q.size(1) - lookback):].clone()
        return q, self.k[:, :end], self.v[:, :end]

aten = torch.ops.aten
# what a checkpointed attention keeps; its other ops run again in backward
KERNELS = [getattr(aten, f'_scaled_dot_product_{kind}').default for kind in (
    'flash_attention', 'flash_attention_for_cpu', 'efficient_attention', 'cudnn_attention')]
keep_kernel_outputs = partial(create_selective_checkpoint_contexts, KERNELS)

class Attention(nn.Module):
    """x (B, T, n_embd) -> (B, T, n_embd). rotation: RoPE's (cos, sin), or None; cache: the layer's KVCache; maps: a list
    that takes the softmax maps."""
    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.n_kv_head, self.d = config.n_head, config.n_kv_head, config.d_head
        self.c_q = nn.Linear(config.n_embd, self.n_head * self.d, bias=False)
        self.c_k = nn.Linear(config.n_embd, self.n_kv_head * self.d, bias=False)
        self.c_v = nn.Linear(config.n_embd, self.n_kv_head * self.d, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.coupling = Coupling(config) if config.coupling != 'none' else None
        # one weight of d each, shared by the heads of a layer (ours)
        self.q_norm, self.k_norm = (RMSNorm(self.d, config) if config.qk_norm else None for _ in range(2))
        self.score = ATTENTIONS[config.attention](config, layer)
        # is there anything elementwise around the kernels that is worth recomputing?
        self.lean = config.lean and config.flash and (config.attention == 'diff' or config.qk_norm or config.pos == 'rope')
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, rotation=None, cache=None, maps=None):
        B, T, C = x.shape
        q = self.c_q(x).view(B, T, self.n_head, self.d)                   # (B, T, H, d)
        k = self.c_k(x).view(B, T, self.n_kv_head, self.d)                # (B, T, K, d)
        v = self.c_v(x).view(B, T, self.n_kv_head, self.d)                # (B, T, K, d)
        if self.coupling is not None:
            q, k = self.coupling(q, k)
        if (self.lean and torch.is_grad_enabled() and cache is maps is None and not torch.compiler.is_compiling()
                and not self.score.recomputes(q, k)):
            # keep q, k, v and what the attention kernels return; recompute the elementwise rest
            y = checkpoint(self.attend, q, k, v, rotation, use_reentrant=False, context_fn=keep_kernel_outputs,
                           preserve_rng_state=self.dropout.p > 0)
        else:
            y = self.attend(q, k, v, rotation, cache, maps)               # (B, T, H, d)
        return self.dropout(self.c_proj(y.reshape(B, T, C)))

    def attend(self, q, k, v, rotation=None, cache=None, maps=None):
        T = q.size(1)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:  # each softmax map of a head is a dot product of its own, and rotated as one
            q, k = (rope(z.unflatten(-1, (self.score.n_maps, -1)).flatten(2, 3), *rotation).view_as(z) for z in (q, k))
        if cache is not None:
            q, k, v = cache.append(q, k, v, self.score.lookback)
        return self.score(q, k, v, maps)[:, -T:]

class SwiGLUProj(torch.autograd.Function):
    """(silu(gate) * up) @ w^T, keeping only gate and up: plain autograd keeps four tensors of width d_ff, this two."""
    @staticmethod
    def forward(ctx, gate, up, w):
        ctx.save_for_backward(gate, up, w)
        return F.linear(F.silu(gate) * up, w.type_as(gate))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate, up, w = ctx.saved_tensors
        a = F.silu(gate)
        dh = dy @ w.type_as(dy)                                           # (B, T, d_ff)
        dw = dy.flatten(0, -2).t() @ (a * up).flatten(0, -2)
        return torch.ops.aten.silu_backward(dh * up, gate), dh * a, dw

class MLP(nn.Module):
    """SwiGLU: (silu(x W_gate) * x W_up) W_proj"""
    def __init__(self, config):
        super().__init__()
        self.lean = config.lean
        self.c_gate = nn.Linear(config.n_embd, config.d_ff, bias=False)
        self.c_up = nn.Linear(config.n_embd, config.d_ff, bias=False)
        self.c_proj = nn.Linear(config.d_ff, config.n_embd, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        gate, up = self.c_gate(x), self.c_up(x)                           # (B, T, d_ff)
        y = SwiGLUProj.apply(gate, up, self.c_proj.weight) if self.lean else self.c_proj(F.silu(gate) * up)
        return self.dropout(y)

class Block(nn.Module):
    """Pre-norm: x += attention(norm(x)); x += SwiGLU(norm(x))"""
    def __init__(self, config, layer):
        super().__init__()
        self.norm_1 = RMSNorm(config.n_embd, config)
        self.attn = Attention(config, layer)
        self.norm_2 = RMSNorm(config.n_embd, config)
        self.mlp = MLP(config)

    def forward(self, x, rotation=None, cache=None, maps=None):
        x = x + self.attn(self.norm_1(x), rotation, cache, maps)
        x = x + self.mlp(self.norm_2(x))
        return x

# ----------------------------------------------------------------------------------------------------------------------
# GPT

class GPT(nn.Module):
    """Decoder of [v2]'s sizes: pre-norm, RMSNorm, SwiGLU, tied embedding and head, no biases in the backbone.

    `seed` fixes the initial weights: each parameter's draw depends on (seed, its name) alone, so a model with a
    coupling and its base model start from equal shared weights, and a coupling of [v2] leaves the logits bitwise equal.
    """
    def __init__(self, config, seed=1337):
        super().__init__()
        self.config = config = replace(config).validate()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
            norm_f=RMSNorm(config.n_embd, config),
        ))
        if config.pos == 'learned':
            self.transformer['wpe'] = nn.Embedding(config.n_pos, config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """N(0, 0.02), residual projections scaled by 1/sqrt(2 n_layer) as in GPT-2 (ours: [v2] does not say).

        Biases are zero, and so are the output layers of the couplings; norms, lambdas and the like keep the values
        that their classes give them.
        """
        for name, p in self.named_parameters():
            module = self.get_submodule(name.rpartition('.')[0])
            if not isinstance(module, (nn.Linear, nn.Embedding)):
                continue
            if p.dim() == 1 or getattr(module, 'zero', False):
                p.zero_()
            elif not p.is_meta:
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith('c_proj.weight') else 0.02
                digest = hashlib.sha256(f'{seed} {name}'.encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], 'big') >> 1)
                p.copy_(torch.randn(p.shape, generator=generator, device='cpu') * std)

    def get_num_params(self):
        """Every parameter, tied weights once, position table included: the counts that [v2] publishes."""
        return sum(p.numel() for p in self.parameters())

    def estimate_flops(self):
        """FLOPs a token of forward and backward at block_size: 2 a weight and use, plus the scores; backward is twice.

        As usual (PaLM, appendix B) attention counts as if not causal, and recomputation does not count.
        """
        flops = 0
        for module in self.modules():
            if isinstance(module, nn.Linear):
                flops += 2 * module.weight.numel() * getattr(module, 'uses', 1)
            elif isinstance(module, LinearMix):
                flops += 2 * module.mix.numel()
        for layer, block in enumerate(self.transformer.h):
            flops += block.attn.score.flops(self.config, layer) * self.config.block_size
        return 3 * flops

    def rotation(self, start, end, device):
        """RoPE's cos and sin of the angles position * 10000^(-2i/d), each (T, 1, d/2), always in float32 (base: ours)."""
        d = self.config.d_head // ATTENTIONS[self.config.attention].n_maps
        frequencies = 10000.0 ** (-torch.arange(0, d, 2, device=device, dtype=torch.float32) / d)
        angles = torch.arange(start, end, device=device, dtype=torch.float32)[:, None, None] * frequencies
        return angles.cos(), angles.sin()

    def trunk(self, idx, caches=None, maps=None):
        """(B, T) token ids -> (B, T, n_embd), after the final norm."""
        start = caches[0].n if caches else 0
        end = start + idx.size(1)
        if end > self.config.block_size:
            raise ValueError(f'a sequence of {end} tokens is longer than block_size={self.config.block_size}')
        x = self.transformer.wte(idx)                                     # (B, T, n_embd)
        rotation = None
        if self.config.pos == 'learned':
            x = x + self.transformer.wpe.weight[start:end]
        else:
            rotation = self.rotation(start, end, idx.device)
        x = self.transformer.drop(x)
        for layer, block in enumerate(self.transformer.h):
            x = block(x, rotation, caches[layer] if caches else None, maps)
        return self.transformer.norm_f(x)

    def forward(self, idx, targets=None, loss_chunk=0):
        """(B, T) token ids -> (logits, loss), as nanoGPT.

        Without targets: logits (B, 1, V) of the last position, loss None. With targets (B, T), -1 where not scored:
        logits (B, T, V) and the mean cross-entropy in nats. With loss_chunk=n the head and the loss are computed for n
        tokens at a time and the logits, the largest tensor of the model, never exist: (None, loss). The head then runs
        in float32, also under autocast.
        """
        x = self.trunk(idx)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        if loss_chunk and hasattr(F, 'linear_cross_entropy'):
            x, targets = x.flatten(0, 1), targets.flatten()               # (B*T, n_embd), (B*T)
            if x.device.type == 'cpu' and not torch.compiler.is_compiling() and (targets == -1).any():
                x, targets = x[targets != -1], targets[targets != -1]     # no head where nothing is scored; a GPU would wait
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=loss_chunk, chunking_method=None,
                                                   allow_retain_graph=torch.compiler.is_compiling())
            return None, F.linear_cross_entropy(full(x), full(self.lm_head.weight), targets, ignore_index=-1, options=options)
        logits = self.lm_head(x)                                          # (B, T, V)
        loss = F.cross_entropy(full(logits).flatten(0, 1), targets.flatten(), ignore_index=-1)
        return (None if loss_chunk else logits), loss

    @torch.no_grad()
    def attention_maps(self, idx):
        """(B, T) token ids -> a list over layers of softmax maps (B, maps, H, T, T): two a head for diff, else one.

        They are the maps as the softmax leaves them: before diff's subtraction, and before mta's second mixing.
        """
        maps = []
        self.trunk(idx, maps=maps)
        return maps

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        """AdamW, as nanoGPT: tensors of two or more dimensions decay, the others do not; fused on CUDA. Parameters of
        the scoring methods do not decay, since zero is no neutral value of theirs (ours)."""
        params = {name: p for name, p in self.named_parameters() if p.requires_grad}
        decay = {name for name, p in params.items() if p.dim() >= 2 and '.score.' not in name}
        groups = [{'params': [p for name, p in params.items() if name in decay], 'weight_decay': weight_decay},
                  {'params': [p for name, p in params.items() if name not in decay], 'weight_decay': 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=device_type == 'cuda')

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, seed=None, use_cache=True):
        """Yield max_new_tokens sampled tokens (B, 1), one by one, after the prompt idx (B, T).

        temperature 0 takes the likeliest token; top_k keeps the k likeliest; seed makes the draw repeatable. Contexts
        longer than block_size are cut to their last block_size tokens, which then cost a full forward a token.
        """
        if idx.size(1) == 0 or temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(f'expected a prompt of at least one token, temperature >= 0 and top_k >= 1; '
                             f'got {idx.size(1)} tokens, temperature={temperature}, top_k={top_k}')
        generator = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
        size, caches = self.config.block_size, None
        for _ in range(max_new_tokens):
            if caches and caches[0].n < size:
                x = self.trunk(idx[:, -1:], caches)
            else:
                caches = [KVCache(size) for _ in self.transformer.h] if use_cache else None
                x = self.trunk(idx[:, -size:], caches)
            logits = full(self.lm_head(x[:, -1]))                         # (B, V)
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, [-1]]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature == 0:
                token = logits.argmax(dim=-1, keepdim=True)
            else:
                token = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
            idx = torch.cat([idx, token], dim=1)
            yield token

    def generate(self, idx, max_new_tokens, **options):
        """Prompt (B, T) -> prompt and continuation (B, T + max_new_tokens); options as in stream()."""
        return torch.cat([idx, *self.stream(idx, max_new_tokens, **options)], dim=1)
