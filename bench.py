"""
What a variant costs: tokens/s and memory of one forward and backward pass, beside the same model without it.

    python bench.py                                              # the tiny model on a CPU, under two minutes
    python bench.py --size=60m --block_size=512 --batch_size=4   # the papers' small model
    python bench.py --variants=standard,diff,diff+alternating --mode=both
    python bench.py --decode                                     # generation with the KV cache
    python bench.py --scaling --png=scaling.png                  # against the length and against the size of the model
    python bench.py --profile                                    # in which operations the time goes

A variant is parts joined by +, in any order: an attention (standard, diff, mta), a coupling (alternating, one_way, ...),
qk_norm, rope, gqa (a quarter of the key heads, as in [v2]), and plain: written plainly, without recomputation in
backward and with full logits. Tokens are random, dropout is off, the optimizer is not run.

How to read the numbers. Machines drift, so each round runs every variant once, in a new random order, and a ratio is the
median over rounds of the ratio within a round. "kept" is what forward leaves in memory for backward, to the byte.
The last line of the output is a JSON document with everything, every round included.
"""
import difflib
import gc
import json
import math
import os
import platform
import random
import re
import sys
import time
from importlib.util import find_spec
from statistics import linear_regression, median
from types import SimpleNamespace

os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # silence the profiler, which counts bytes below

import torch
import torch.profiler
from torch.profiler import ProfilerActivity

from configurator import ConfigError, configure
from model import ATTENTIONS, COUPLINGS, GPT, SIZES, GPTConfig, KVCache
from train import PEAK_FLOPS

# ----------------------------------------------------------------------------------------------------------------------
# settings: override them by config files and --key=value; --help prints them

size = 'tiny'             # tiny | 60m | 150m | 455m
variants = 'standard,plain,alternating,diff,diff+alternating,mta,mta+alternating,qk_norm,qk_norm+alternating'  # standard is always measured
block_size = 256          # T, tokens in a sequence
batch_size = 2            # B, sequences in a step, or generated at once
vocab_size = 50257        # GPT-2 BPE; the head is a large part of a small model
rounds = 7                # timed steps of each variant; with --decode, generations
mode = 'eager'            # eager | compiled (torch.compile, full graph) | both
loss_chunk = -1           # compute the loss for so many tokens at a time; 0: all at once; -1: 512 on a CPU, 0 on a GPU
device = 'auto'           # auto | cpu | cuda | cuda:N
dtype = 'auto'            # auto | float32 | bfloat16, of matrix products; auto: float32 on a CPU, bfloat16 on a GPU
seed = 1337               # of the weights, the tokens and the order within a round, >= 0
# instead of the cost tables:
decode = False            # generation with the KV cache: tokens/s, time of a token, bytes of the cache
contexts = '512,2048'     # positions that are filled when generation ends
new_tokens = 32           # tokens to generate: the first reads the prompt and is timed apart
scaling = False           # tokens/s and kept bytes against T and against the size of the model, with growth exponents
lengths = '256,512,1024,2048,4096'  # the T's, at `size` and `batch_size`
sizes = 'tiny,60m,150m'   # the sizes, at `block_size` and `batch_size`
png = ''                  # file to draw the scaling figure into; needs matplotlib
profile = False           # milliseconds a step in each operation, profiled over `rounds` steps
defaults = {k: v for k, v in globals().items() if k[0] != '_' and type(v) in (bool, int, float, str)}

# ----------------------------------------------------------------------------------------------------------------------
# published: (tokens/s relative to standard, peak memory) on an H100; forward+backward, batch 8 at 512, 2 at 2048.
# Source: the cost table of [v2], "Invertible Query-Key Coupling Composes with Attention Mechanisms". None: not given.

PUBLISHED = {
    ('60m', 512): {'standard': (1.00, 4175), 'alternating': (0.90, 5071), 'diff': (0.86, 5199), 'diff+alternating': (0.79, 6095)},  # MB
    ('60m', 2048): {'standard': (1.00, None), 'alternating': (0.85, None), 'diff': (0.68, None), 'diff+alternating': (0.61, None)},
    ('455m', 512): {'standard': (1.00, 16.7), 'alternating': (0.91, 22.1), 'diff': (0.87, 22.8), 'diff+alternating': (0.81, 28.2)},  # GB
    ('455m', 2048): {'standard': (1.00, 26.4), 'alternating': (0.94, 31.8), 'diff': (0.72, 51.3), 'diff+alternating': (0.69, 56.7)},
}

# ----------------------------------------------------------------------------------------------------------------------
# variants

PARTS = {  # part of a variant's name -> the field of GPTConfig that it sets, and to what
    **{name: ('attention', name) for name in ATTENTIONS}, **{name: ('coupling', name) for name in COUPLINGS},
    'qk_norm': ('qk_norm', True), 'rope': ('pos', 'rope'), 'gqa': ('n_kv_head', 'n_head / 4'), 'plain': ('lean', False),
}


def variant_config(name, size, block_size, vocab_size=50257):
    """GPTConfig of a variant such as 'diff+alternating'. Raises ValueError if the name has no meaning."""
    fields = {}
    for part in name.split('+'):
        if part not in PARTS:
            near = difflib.get_close_matches(part, PARTS, n=1, cutoff=0)[0]
            raise ValueError(f'unknown part {part!r} in variant {name!r}, did you mean {near!r}? All: {", ".join(PARTS)}')
        field, value = PARTS[part]
        if field in fields:
            raise ValueError(f'variant {name!r} sets {field} twice: {fields[field]!r} and {value!r}')
        fields[field] = value
    if 'n_kv_head' in fields:
        fields['n_kv_head'] = SIZES[size]['n_head'] // 4
    n_pos = max(2048, block_size)  # the papers' position table has 2048 rows; a longer sequence needs more
    return GPTConfig(**SIZES[size], **fields, block_size=block_size, vocab_size=vocab_size, n_pos=n_pos).validate()

# ----------------------------------------------------------------------------------------------------------------------
# forward and backward

def kept_bytes(forward, device):
    """Bytes that are alive once `forward()` has returned its loss and were not before: what is kept for backward.

    Counted by the allocator, so it does not matter how they are kept: as saved tensors, as the inputs of a checkpoint,
    or in the context of an op (the chunked loss keeps the gradients of the head there, which no saved-tensor hook
    sees). Weights, inputs and the loss itself do not count. Exact on a CPU; a GPU rounds each tensor up to 512 bytes.
    """
    gc.collect()  # nothing old may be freed while we count
    if torch.device(device).type == 'cuda':
        before = torch.cuda.memory_allocated()
        loss = forward()
        return torch.cuda.memory_allocated() - before - 512  # the loss
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        loss = forward()
    return sum(event.self_cpu_memory_usage for event in prof.events()) - loss.untyped_storage().nbytes()


def measure(cfg, names, size, block_size):
    """Time and weigh one forward+backward of each variant. Returns {mode: {variant: dict}}, modes as in `cfg.mode`."""
    modes = ['eager', 'compiled'] if cfg.mode == 'both' else [cfg.mode]
    if 'compiled' in modes:
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = len(names) + 8  # one graph a model, all of the same code
    generator = torch.Generator().manual_seed(cfg.seed)
    tokens = torch.randint(cfg.vocab_size, (2, cfg.batch_size, block_size), generator=generator).to(cfg.device)

    runs, out = [], {mode: {} for mode in modes}
    for name in names:
        model = GPT(variant_config(name, size, block_size, cfg.vocab_size), seed=cfg.seed).to(cfg.device)
        chunk = cfg.loss_chunk if model.config.lean else 0
        for mode in modes:
            call = torch.compile(model, fullgraph=True, dynamic=False) if mode == 'compiled' else model
            out[mode][name] = {'params': model.get_num_params(), 'flops_per_token': model.estimate_flops(),
                               'kept_bytes': None, 'peak_bytes': None, 'seconds': []}
            runs.append(SimpleNamespace(model=model, call=call, chunk=chunk, out=out[mode][name]))

    def forward(run):
        with cfg.autocast():
            return run.call(tokens[0], tokens[1], loss_chunk=run.chunk)[1]

    def step(run):
        forward(run).backward()
        cfg.sync()

    def weigh(run):
        """Kept bytes, and on a GPU the peak of a step: weights, gradients and activations of this model alone."""
        run.out['kept_bytes'] = kept_bytes(lambda: forward(run), cfg.device)
        if cfg.device != 'cpu':
            others = torch.cuda.memory_allocated() - sum(p.nbytes for p in run.model.parameters())
            torch.cuda.reset_peak_memory_stats()
            step(run)
            run.out['peak_bytes'] = torch.cuda.max_memory_allocated() - others
        run.model.zero_grad(set_to_none=True)

    for i, run in enumerate(runs):
        say(f'warmup {i + 1}/{len(runs)}, {size}, T={block_size}')
        step(run)  # compiles, and fills what torch caches once
        run.model.zero_grad(set_to_none=True)
        weigh(run)
    for i in range(cfg.rounds):
        say(f'round {i + 1}/{cfg.rounds}, {size}, T={block_size}')
        for run in random.Random(f'{cfg.seed} {i}').sample(runs, len(runs)):
            start = time.perf_counter()
            step(run)
            run.out['seconds'].append(time.perf_counter() - start)
            run.model.zero_grad(set_to_none=True)
    say('')
    for run in runs:
        run.out['tokens_per_s'] = [cfg.batch_size * block_size / s for s in run.out['seconds']]
    return out


def pairs(names):
    """What is compared: (variant, base). 'a+b' is also compared with 'a' if that is there, and standard with plain."""
    out = [(name, 'standard') for name in names if name != 'standard']
    out += [(name, base) for name in names if (base := name.rpartition('+')[0]) in names and base != 'standard']
    return out + [('standard', 'plain')] * ('plain' in names)


def compare(a, b):
    """Ratios of two results of `measure`; that of tokens/s is taken round by round."""
    speed = [y / x for x, y in zip(a['seconds'], b['seconds'])]
    return {'tokens_per_s': median(speed), 'tokens_per_s_rounds': speed, 'kept': a['kept_bytes'] / b['kept_bytes'],
            'peak': a['peak_bytes'] / b['peak_bytes'] if a['peak_bytes'] else None}


def cost_table(cfg, names):
    """Measure, and print a table of costs and one of ratios for each mode."""
    results, out = measure(cfg, names, cfg.size, cfg.block_size), {}
    published = PUBLISHED.get((cfg.size, cfg.block_size), {})
    peak_flops = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in cfg.name and cfg.dtype == 'bfloat16'), None)
    for mode, result in results.items():
        print(f'\n{mode}: {cfg.size}, batch {cfg.batch_size} x {cfg.block_size}, {cfg.dtype} on {cfg.name}, {cfg.rounds} rounds')
        rows = []
        for name, r in result.items():
            r['overhead_percent'] = 100 * (r['params'] / result['standard']['params'] - 1)
            r['flops_per_s'] = median(r['tokens_per_s']) * r['flops_per_token']
            r['mfu'] = r['flops_per_s'] / peak_flops if peak_flops else None
            rows.append([name, f'{r["params"]:,}', f'{r["overhead_percent"]:+.2f}%', f'{r["flops_per_token"] / 1e6:.1f}',
                         f'{median(r["tokens_per_s"]):,.0f}', spread(r['tokens_per_s'], ',.0f'), mib(r['kept_bytes']),
                         mib(r['peak_bytes']), f'{r["flops_per_s"] / 1e12:.3g}', show(r['mfu'], '.1%') or 'n/a'])
        print_table('variant|parameters|overhead|MFLOP/token|tok/s|min - max|kept MiB|peak MiB|TFLOP/s|MFU', rows)
        ratios, rows = {}, []
        for a, b in pairs(names):
            c = ratios[f'{a} / {b}'] = compare(result[a], result[b])
            h100 = [x / y if x and y else None for x, y in zip(published.get(a, (None, None)), published.get(b, (None, None)))]
            c['tokens_per_s_h100'], c['peak_h100'] = h100
            rows.append([f'{a} / {b}', show(c['tokens_per_s'], '.3f'), spread(c['tokens_per_s_rounds'], '.3f'), show(h100[0]),
                         show(c['kept'], '.3f'), show(c['peak'], '.3f'), show(h100[1])])
        print()
        print_table('ratio|tok/s|min - max|tok/s, H100 of [v2]|kept|peak|peak, H100 of [v2]', rows)
        out[mode] = {'variants': result, 'ratios': ratios}
    return out

# ----------------------------------------------------------------------------------------------------------------------
# profile

def profile_table(cfg, names):
    """Print and return {variant: {operation: milliseconds of a step}}: forward and backward, eager, each operation's own time,
    without that of those it calls; on a GPU that of the kernels."""
    tokens = torch.randint(cfg.vocab_size, (2, cfg.batch_size, cfg.block_size),
                           generator=torch.Generator().manual_seed(cfg.seed)).to(cfg.device)
    kind = ProfilerActivity.CPU if cfg.device == 'cpu' else ProfilerActivity.CUDA
    own_time = 'self_cpu_time_total' if cfg.device == 'cpu' else 'self_device_time_total'
    models = {name: GPT(variant_config(name, cfg.size, cfg.block_size, cfg.vocab_size), seed=cfg.seed).to(cfg.device)
              for name in names}
    out = {name: {} for name in names}

    def step(model):
        with cfg.autocast():
            loss = model(tokens[0], tokens[1], loss_chunk=cfg.loss_chunk if model.config.lean else 0)[1]
        loss.backward()
        model.zero_grad(set_to_none=True)
        cfg.sync()

    for i in range(cfg.rounds + 1):  # the first is a warmup
        say(f'round {i}/{cfg.rounds}')
        for name in random.Random(f'{cfg.seed} {i}').sample(names, len(names)):
            with torch.profiler.profile(activities=[kind]) as prof:
                step(models[name])
            for event in prof.key_averages() if i > 0 else ():
                out[name][event.key] = out[name].get(event.key, 0) + getattr(event, own_time) / 1e3 / cfg.rounds
    say('')
    print(f'\nprofile: {cfg.size}, batch {cfg.batch_size} x {cfg.block_size}, {cfg.dtype} on {cfg.name}, {cfg.rounds} steps, ms a step')
    ops = sorted(set().union(*out.values()), key=lambda op: -max(times.get(op, 0) for times in out.values()))
    rows = [[op[:60], *(f'{out[name].get(op, 0):,.1f}' for name in names)] for op in ops[:20]]
    rows.append(['all', *(f'{sum(out[name].values()):,.1f}' for name in names)])
    print_table('|'.join(['operation', *names]), rows)
    return out

# ----------------------------------------------------------------------------------------------------------------------
# decode

@torch.no_grad()
def cache_bytes(model, context, cfg):
    """(bytes a token, bytes in all) of the caches of one sequence of `context` positions, over all layers.

    Both are read off the tensors: keys and values grow with the context; the few queries that mta keeps do not.
    """
    caches = [KVCache(context) for _ in model.transformer.h]
    with cfg.autocast():
        for length in min(16, context - 1), 1:  # a prompt and a token, so that mta's queries are all there
            model.trunk(torch.zeros(1, length, dtype=torch.long, device=cfg.device), caches)
    grows = sum(c.k.nbytes + c.v.nbytes for c in caches)
    return grows // context, grows + sum(c.q.nbytes for c in caches)


def decode_table(cfg, names):
    """Generate `new_tokens` tokens up to each context; print tokens/s, and the time of a token at each context."""
    models = {name: GPT(variant_config(name, cfg.size, max(cfg.contexts), cfg.vocab_size), seed=cfg.seed).to(cfg.device).eval()
              for name in names}
    out = {name: {context: {'first_token_seconds': [], 'seconds': []} for context in cfg.contexts} for name in names}
    jobs = [(name, context) for name in names for context in cfg.contexts]
    for i in range(cfg.rounds + 1):  # the first is a warmup
        say(f'round {i}/{cfg.rounds}')
        for name, context in random.Random(f'{cfg.seed} {i}').sample(jobs, len(jobs)):
            generator = torch.Generator().manual_seed(cfg.seed)
            prompt = torch.randint(cfg.vocab_size, (cfg.batch_size, context - cfg.new_tokens), generator=generator).to(cfg.device)
            cfg.sync()
            stamps = [time.perf_counter()]
            with cfg.autocast():
                for _ in models[name].stream(prompt, cfg.new_tokens, seed=cfg.seed):
                    cfg.sync()
                    stamps.append(time.perf_counter())
            if i > 0:
                out[name][context]['first_token_seconds'].append(stamps[1] - stamps[0])
                out[name][context]['seconds'].append((stamps[-1] - stamps[1]) / (cfg.new_tokens - 1))  # a token
    say('')
    rows = []
    for name, context in jobs:
        r = out[name][context]
        r['tokens_per_s'] = [cfg.batch_size / s for s in r['seconds']]
        r['cache_bytes_per_token'], r['cache_bytes'] = cache_bytes(models[name], context, cfg)
        against = lambda other: show(median(y / x for x, y in zip(r['seconds'], other['seconds'])))
        rows.append([name, str(context), f'{median(r["tokens_per_s"]):,.0f}', spread(r['tokens_per_s'], ',.0f'),
                     against(out['standard'][context]), f'{1e3 * median(r["seconds"]):.2f}', against(out[name][cfg.contexts[0]]),
                     f'{1e3 * median(r["first_token_seconds"]):,.1f}', f'{r["cache_bytes_per_token"]:,}', mib(r['cache_bytes'])])
    print(f'\ndecode: {cfg.size}, batch {cfg.batch_size}, {cfg.new_tokens} tokens up to the context, {cfg.dtype} on {cfg.name}, '
          f'{cfg.rounds} rounds\nThe first token reads the whole prompt; without a cache every token would cost as much.')
    print_table(f'variant|context|tok/s|min - max|/ standard|ms/token|tok/s / at {cfg.contexts[0]}|ms first token|'
                'cache bytes/token|cache MiB/sequence', rows)
    return out

# ----------------------------------------------------------------------------------------------------------------------
# scaling

def exponent(x, y):
    """Slope of log y against log x: y grows as x to this power. None with fewer than two points."""
    return linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope if len(set(x)) > 1 else None


def scaling_tables(cfg, names):
    """Measure over `lengths` at `size` and over `sizes` at `block_size`; print two tables for each, draw if asked."""
    out = {}
    for axis, grid in ('T', [(cfg.size, T) for T in cfg.lengths]), ('parameters', [(size, cfg.block_size) for size in cfg.sizes]):
        points = [measure(cfg, names, *point)[cfg.mode] for point in grid]
        out[axis] = {}
        for name in names:
            rounds = [point[name] for point in points]
            x = cfg.lengths if axis == 'T' else [r['params'] for r in rounds]
            speed, kept = [median(r['tokens_per_s']) for r in rounds], [r['kept_bytes'] for r in rounds]
            out[axis][name] = {'x': x, 'tokens_per_s': speed, 'kept_bytes': kept, 'points': rounds,
                               'time_per_token_exponent': exponent(x, [1 / s for s in speed]),
                               'kept_bytes_exponent': exponent(x, kept)}
        heads = '|'.join(f'T={T}' for T in cfg.lengths) if axis == 'T' else '|'.join(cfg.sizes)
        print(f'\nscaling: {cfg.size if axis == "T" else f"T={cfg.block_size}"}, batch {cfg.batch_size}, {cfg.mode}, {cfg.dtype} '
              f'on {cfg.name}, {cfg.rounds} rounds')
        print_table(f'tok/s|{heads}|time/token ~ {axis}^', [
            [name, *(f'{v:,.0f}' for v in s['tokens_per_s']), show(s['time_per_token_exponent'])]
            for name, s in out[axis].items()])
        print()
        print_table(f'kept MiB|{heads}|kept ~ {axis}^', [
            [name, *map(mib, s['kept_bytes']), show(s['kept_bytes_exponent'])] for name, s in out[axis].items()])
    if cfg.png:
        draw(cfg, out)
    return out


def draw(cfg, out):
    """A log-log figure: tokens/s above, kept bytes below; against T on the left, against the size on the right."""
    import matplotlib
    matplotlib.use('Agg')  # needs no display
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout='constrained')
    for column, (axis, curves) in enumerate(out.items()):
        for row, key, of in (0, 'tokens_per_s', 'time_per_token'), (1, 'kept_bytes', 'kept_bytes'):
            panel = axes[row][column]
            for name, s in curves.items():
                panel.loglog(s['x'], s[key], marker='o', label=f'{name} ({show(s[of + "_exponent"])})')
            panel.set(xlabel=f'T, {cfg.size}' if axis == 'T' else f'parameters, T = {cfg.block_size}',
                      ylabel=('tokens/s', 'bytes kept for backward')[row])
            panel.set_xscale('log', base=2 if axis == 'T' else 10)
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8, title_fontsize=8, title=f'exponent of {of.replace("_", " ")}')
    figure.suptitle(f'forward+backward, batch {cfg.batch_size}, {cfg.mode}, {cfg.dtype}, {cfg.name}')
    figure.savefig(cfg.png, dpi=120)
    print(f'\nwrote {cfg.png}')

# ----------------------------------------------------------------------------------------------------------------------
# output

def show(x, form='.2f'):
    return '' if x is None else format(x, form)


def mib(n):
    return '' if n is None else f'{n / 2**20:,.1f}'


def spread(values, form):
    return f'{min(values):{form}} - {max(values):{form}}'


def print_table(head, rows):
    """A Markdown table that also reads well in a terminal; columns that are empty throughout are left out."""
    columns = [c for c in zip(head.split('|'), *rows) if any(c[1:])]
    widths = [max(map(len, c)) for c in columns]
    for i, row in enumerate(zip(*columns)):
        print('| ' + ' | '.join(x.ljust(w) if j == 0 else x.rjust(w) for j, (x, w) in enumerate(zip(row, widths))) + ' |')
        if i == 0:
            print('|' + '|'.join('-' * (w + 2) if j == 0 else '-' * (w + 1) + ':' for j, w in enumerate(widths)) + '|')


def say(progress):
    """Progress, on one line of the terminal that the next overwrites; a log file stays clean."""
    if sys.stderr.isatty():
        print('\r\033[K' + progress, end='', file=sys.stderr, flush=True)

# ----------------------------------------------------------------------------------------------------------------------

def check(cfg):
    """Refuse what cannot work before anything is measured; split the lists."""
    given = dict(vars(cfg))
    def need(ok, key, expected):
        if not ok:
            raise ConfigError(f'--{key}={given[key]}: expected {expected}')
    for key in 'block_size', 'batch_size', 'vocab_size', 'rounds':
        need(getattr(cfg, key) >= 1, key, 'at least 1')
    need(cfg.seed >= 0, 'seed', 'at least 0')
    need(cfg.loss_chunk >= -1, 'loss_chunk', 'a number of tokens, 0 (all at once) or -1 (by device)')
    need(cfg.size in SIZES, 'size', 'one of ' + ', '.join(SIZES))
    need(cfg.mode in ('eager', 'compiled', 'both'), 'mode', 'eager, compiled or both')
    need(cfg.dtype in ('auto', 'float32', 'bfloat16'), 'dtype', 'auto, float32 or bfloat16')
    need(re.fullmatch(r'auto|cpu|cuda(:\d+)?', cfg.device), 'device', 'auto, cpu, cuda or cuda:N')
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cfg.device.startswith('cuda'):
        need(int(cfg.device[5:] or 0) < gpus, 'device', f'a GPU, but PyTorch {torch.__version__} sees {gpus} here: '
             '--device=cpu works anywhere')
    for key, kind in ('contexts', int), ('lengths', int), ('sizes', str), ('variants', str):
        try:
            setattr(cfg, key, [kind(x) for x in getattr(cfg, key).replace(' ', '').split(',')])
        except ValueError:
            need(False, key, 'whole numbers joined by commas')
    if cfg.decode:
        need(cfg.new_tokens >= 2, 'new_tokens', 'at least 2: the first is timed apart')
        need(min(cfg.contexts) > cfg.new_tokens, 'contexts', f'each longer than new_tokens={cfg.new_tokens}')
        need(cfg.mode == 'eager', 'mode', 'eager: --decode is not compiled')
    if cfg.scaling:
        need(min(cfg.lengths) >= 1, 'lengths', 'each at least 1')
        need(set(cfg.sizes) <= set(SIZES), 'sizes', 'some of ' + ', '.join(SIZES))
        need(cfg.mode != 'both', 'mode', 'eager or compiled with --scaling')
    if cfg.profile:
        need(cfg.mode == 'eager', 'mode', 'eager: compiled code has no names of operations')
    if cfg.png:
        need(cfg.scaling, 'png', '--scaling beside it: it draws that figure')
        need(cfg.png.endswith('.png') and os.path.isdir(os.path.dirname(cfg.png) or '.'), 'png', 'a .png in a folder that exists')
        need(find_spec('matplotlib'), 'png', 'matplotlib to be installed: pip install matplotlib')
    cfg.variants = list(dict.fromkeys(['standard'] * ('standard' not in cfg.variants) + cfg.variants))
    for name in cfg.variants:
        try:
            variant_config(name, cfg.size, cfg.block_size)
        except ValueError as e:
            raise ConfigError(f'--variants: {e}') from None


def set_up(cfg):
    """Choose what `auto` and -1 leave open, and make the device ready."""
    if cfg.device == 'auto':
        cfg.device = 'cuda' if torch.cuda.is_available() else 'cpu'
    on_gpu = cfg.device != 'cpu'
    if on_gpu:
        torch.cuda.set_device(cfg.device)
        torch.set_float32_matmul_precision('high')  # TF32
    if cfg.dtype == 'auto':
        cfg.dtype = 'bfloat16' if on_gpu else 'float32'
    if cfg.loss_chunk == -1:
        cfg.loss_chunk = 0 if on_gpu else 512
    cfg.name = torch.cuda.get_device_name() if on_gpu else f'{torch.get_num_threads()} threads, {platform.machine()}'
    cfg.autocast = lambda: torch.autocast('cuda' if on_gpu else 'cpu', torch.bfloat16, enabled=cfg.dtype == 'bfloat16')
    cfg.sync = torch.cuda.synchronize if on_gpu else lambda: None
    if cfg.mode != 'eager':
        try:
            torch.compile(lambda x: x + 1)(torch.zeros(2, device=cfg.device))
        except Exception as e:
            raise ConfigError(f'--mode={cfg.mode}: torch.compile fails here: {str(e).splitlines()[0]}\n'
                              'Install a C++ compiler (CPU) or Triton (GPU), or use --mode=eager') from None


def main(argv):
    settings = configure(defaults, argv)
    cfg = SimpleNamespace(**settings)
    check(cfg)
    set_up(cfg)
    document = {'config': {**settings, 'device': cfg.device, 'dtype': cfg.dtype, 'loss_chunk': cfg.loss_chunk},
                'device': cfg.name, 'threads': torch.get_num_threads(), 'torch': torch.__version__}
    if cfg.decode:
        document['decode'] = decode_table(cfg, cfg.variants)
    if cfg.scaling:
        document['scaling'] = scaling_tables(cfg, cfg.variants)
    if cfg.profile:
        document['profile'] = profile_table(cfg, cfg.variants)
    if not cfg.decode and not cfg.scaling and not cfg.profile:
        document['cost'] = cost_table(cfg, cfg.variants)
    print('\n' + json.dumps(document))


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except ConfigError as e:
        sys.exit(f'error: {e}')
