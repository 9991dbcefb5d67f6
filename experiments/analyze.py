"""
What the attention of a checkpoint of train.py looks like on a text, layer by layer and head by head.

    python experiments/analyze.py --ckpt=out/tiny/best.pt                                  # 8 windows of the validation split
    python experiments/analyze.py --ckpt=out/tiny/best.pt --text=README.md --windows=0 --png=tiny --json=tiny.json

Prints a table (heads averaged), its means over all layers and over the last third, and, as last line, everything as one JSON
document, which --json=PATH keeps. --png=PREFIX draws heat maps, layers x heads: PREFIX_effective_rank.png and so on.

Of each softmax map, as the softmax leaves it: diff has two a head, before their subtraction, and mta's are those before its
second convolution and mixing. A map is T x T, T the tokens of a window; each number is a mean over windows.
  effective_rank  exp of the entropy of the singular values over their sum [v2, Table 17], 1 to T. Published at 455M, last third
                  of the layers: standard 46.2, alternating 53.5, diff 42.5, diff+alternating 45.3; on which text is not said.
                  That a figure of diff is the mean of both maps, and which layers are a third of 8, rounded up, is ours.
  Of its rows, as means over all rows but the first, which sees one key whatever the model does:
  entropy         in nats, over the log of the number of keys that the row sees: 0 (one key) to 1 (uniform)
  top1            the largest weight
  logit_variance  variance over the keys seen of the logits that enter the softmax: q.k / sqrt(d) for standard, the same of each
                  half's own q and k, with d/2, for diff; for mta after its first convolution and mixing. Read off the map:
                  log p is the logit but for a constant of the row.
  underflow       share of the weights too small for the float type, whose logits count as that of the smallest one: where it is
                  not 0, logit_variance is a lower bound

Of q (H heads) and k (one for each key head), before and after the coupling, QK-norm and RoPE not yet applied:
  pr              participation ratio [geom] (sum of e)^2 / sum of e^2, e the eigenvalues of the covariance over tokens, 1 to d
  action          ||q' - q|| / ||q||, mean over tokens
  log_scale       (alternating, simultaneous; a row for each round) mean and standard deviation over tokens and dimensions of
                  the clamped log-scales s that move q or k, and the share of them at the clamp, |s| = 3
"""
import math
import os
import sys
from collections import defaultdict
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import model as model_py
import prepare
from configurator import ConfigError, configure
from experiments.evaluate import load, open_corpus, set_up, tokenizer_of
from model import Alternating, full, future
from train import refuse, to_tensor

ckpt = ''                  # the checkpoint
text = ''                  # a file of UTF-8 text to look at; '': the corpus
dataset = ''               # corpus, of the same tokenizer; '': the one the checkpoint was trained on
split = 'val'              # of that corpus: train | val | test
windows = 8                # windows of block_size tokens (of all, if the text is shorter), drawn by seed; 0: all
seed = 0                   # of that draw, >= 0
batch_size = 4             # windows at a time; does not change the numbers
device = 'auto'            # auto | cpu | cuda | cuda:N
dtype = 'auto'             # auto | float32 | bfloat16 | float16; auto as in training: float32 on a CPU, else bfloat16
png = ''                   # draw heat maps into PREFIX_NAME.png; needs matplotlib
json = ''                  # file to write, the same as the last line
defaults = {k: v for k, v in globals().items() if k[0] != '_' and type(v) in (bool, int, float, str)}

PICTURES = dict(effective_rank='effective rank', entropy='entropy of rows / log(keys seen)', top1='largest weight of a row')
COUPLED = dict(pr_q_ratio='PR of q, after / before coupling', action_q="|q' - q| / |q|",
               pr_k_ratio='PR of k, after / before coupling', action_k="|k' - k| / |k|")

# ----------------------------------------------------------------------------------------------------------------------
# measures

def effective_rank(maps):
    """(..., T, T) -> (...)"""
    p = torch.linalg.svdvals(full(maps))
    p = p / p.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1).exp()


def of_rows(maps):
    """Measures of the rows of causal maps: (..., T, T) -> a dict of (...)"""
    T, tiny = maps.size(-1), torch.finfo(maps.dtype).tiny
    p, seen = full(maps[..., 1:, :]), ~future(T, T, maps.device)[1:]      # (..., T-1, T)
    n = torch.arange(2, T + 1, device=maps.device)                        # keys that a row sees
    logits = p.clamp_min(tiny).log()  # a clamp can only lower the variance
    centred = (logits - (logits * seen).sum(-1, keepdim=True) / n[:, None]) * seen
    rows = dict(entropy=torch.special.entr(p).sum(-1) / n.log(), top1=p.amax(-1), logit_variance=centred.square().sum(-1) / n,
                underflow=((p < tiny) & seen).sum(-1) / n)
    return {name: value.mean(-1) for name, value in rows.items()}


def moments(x):
    """First and second moments over tokens: (B, T, H, d) -> (B, H, d), (B, H, d, d), in float64."""
    x = x.double()
    return x.mean(1), torch.einsum('bthi,bthj->bhij', x, x) / x.size(1)


def participation_ratio(first, second):
    """Of the covariance with these moments, (..., d) and (..., d, d) -> (...).

    No eigenvalues needed: their sum is the trace, the sum of their squares that of all entries.
    """
    covariance = second - first[..., :, None] * first[..., None, :]
    return covariance.diagonal(dim1=-2, dim2=-1).sum(-1).square() / covariance.square().sum((-2, -1))


class Probe(ExitStack):
    """Takes the place of the list of maps in GPT.trunk: measures a layer's maps as they are made, beside what hooks saw of its
    q, k and log-scales, and keeps only sums over windows, so that the maps of one layer and batch exist at a time."""
    def __init__(self, model):
        super().__init__()
        self.sums, self.n_windows = [defaultdict(float) for _ in model.transformer.h], 0
        self.seen, self.layer = {}, 0  # of the layer that runs

        def watch(module, note):
            self.enter_context(module.register_forward_hook(lambda module, inputs, output: note(output)))

        def log_scales(side):
            return lambda output: self.seen.setdefault(f's_{side}', []).append(output[0])

        def heads(side):
            return lambda output: self.seen.update({side: output.unflatten(-1, (-1, model.config.d_head))})

        for block in model.transformer.h:
            watch(block.attn.c_q, heads('q'))
            watch(block.attn.c_k, heads('k'))
            if block.attn.coupling is not None:
                watch(block.attn.coupling, lambda output: self.seen.update(after=output))
                for net in block.attn.coupling.nets:  # one a round
                    if isinstance(net, Alternating):
                        watch(net.net_q, log_scales('q'))
                        watch(net.net_k, log_scales('k'))

    def append(self, maps):
        """maps (B, maps, H, T, T) of the next layer; its q and k are (B, T, heads, d)."""
        seen, sums = self.seen, self.sums[self.layer]

        def add(name, value):  # value (B, ...): one for each window
            sums[name] = sums[name] + value.double().sum(0)

        for name, value in dict(effective_rank=effective_rank(maps), **of_rows(maps)).items():
            add(name, value)                                              # (B, maps, H)
        for side, x, y in zip('qk', (seen['q'], seen['k']), seen.get('after', (seen['q'], seen['k']))):
            x, y = x.double(), y.double()
            add(f'action_{side}', ((y - x).norm(dim=-1) / x.norm(dim=-1)).mean(1))  # (B, heads)
            for when, z in ('before', x), ('after', y):
                for name, value in zip(('first', 'second'), moments(z)):
                    add(f'{name}_{side}_{when}', value)
            if f's_{side}' in seen:
                s = torch.stack(seen[f's_{side}'], dim=1).double()        # (B, rounds, T, K, d)
                for name, value in dict(mean=s, square=s.square(), clamped=s.abs() >= model_py.CLAMP).items():
                    add(f'log_scale_{side}_{name}', value.double().mean((2, 4)))
        if self.layer == 0:
            self.n_windows += len(maps)
        self.seen, self.layer = {}, (self.layer + 1) % len(self.sums)

    def results(self):
        """For each layer {measure: (maps, H), (heads) or, log-scales, (rounds, K)}, float64 on the CPU."""
        layers = []
        for sums in self.sums:
            mean = {name: total.cpu() / self.n_windows for name, total in sums.items()}
            for side in 'qk':
                before, after = (participation_ratio(mean.pop(f'first_{side}_{when}'), mean.pop(f'second_{side}_{when}'))
                                 for when in ('before', 'after'))
                mean |= {f'pr_{side}_before': before, f'pr_{side}_after': after, f'pr_{side}_ratio': after / before}
                s = f'log_scale_{side}_'
                if s + 'mean' in mean:
                    mean[s + 'std'] = (mean.pop(s + 'square') - mean[s + 'mean'].square()).clamp_min(0).sqrt()
            layers.append(mean)
        return layers


@torch.no_grad()
def measure(model, windows, batch_size, device='cpu', autocast=nullcontext()):
    """Probe.results() of an array (windows, T) of token ids, T >= 2."""
    with Probe(model) as probe:
        for lo in prepare.progress(range(0, len(windows), batch_size), desc='analyze', unit=' batches'):
            ids = to_tensor(windows[lo:lo + batch_size], device)
            with autocast:
                model.trunk(ids, maps=probe)
    return probe.results()


def last_third(layers):
    return layers[-math.ceil(len(layers) / 3):]


def summarize(layers):
    """{measure: its mean over the layers, and their heads, maps and rounds}"""
    return {name: torch.stack([layer[name] for layer in layers]).mean().item() for name in layers[0]}

# ----------------------------------------------------------------------------------------------------------------------
# the text

def read_windows(cfg, model, state):
    """(array (windows, T) of ids, what they are from, which windows of it)"""
    size = model.config.block_size
    if cfg.text:
        if state['tokenizer']['name'] == 'none':
            refuse(f'--text={cfg.text}, but --ckpt={cfg.ckpt} was trained on {state["data"]["name"]}, rows of ids that stand for '
                   'no text: without --text, it is shown its own rows')
        try:
            ids = np.array(tokenizer_of(state, cfg.ckpt).encode_ordinary(Path(cfg.text).read_text(encoding='utf-8')))
        except (OSError, UnicodeDecodeError) as e:
            refuse(f'--text={cfg.text}: expected a file of UTF-8 text ({e})')
        if len(ids) < 2:
            refuse(f'--text={cfg.text} has {len(ids)} tokens, expected at least 2')
        source, size = cfg.text, min(size, len(ids))
    else:
        corpus = open_corpus(SimpleNamespace(cfg=cfg, model=model, state=state))
        source, row_length = f'{corpus.name}, {cfg.split} split', corpus.meta.get('row_length', 0)
        if row_length > size:
            refuse(f'{corpus.path} has rows of {row_length} tokens, but the block_size of the model is {size}')
        ids, size = corpus.tokens(cfg.split), row_length or size
        if not row_length:
            corpus.require(cfg.split, size)
    rows = ids[:len(ids) // size * size].reshape(-1, size)
    if cfg.windows > len(rows):
        refuse(f'--windows={cfg.windows}, but {source} has {len(rows)} of {size} tokens; --windows=0 takes all')
    chosen = np.arange(len(rows))
    if cfg.windows:
        chosen = np.sort(np.random.default_rng(cfg.seed).choice(chosen, cfg.windows, replace=False))
    return rows[chosen], source, chosen.tolist()

# ----------------------------------------------------------------------------------------------------------------------
# output

def print_table(layers, ranges):
    """ranges: {name: its layers}, lines of means at the end."""
    lines = [(str(i), layer) for i, layer in enumerate(layers)]
    lines += [(name, {k: torch.stack([layer[k] for layer in some]).mean(0) for k in layers[0]}) for name, some in ranges.items()]
    print(f'{"layer":>10} {"map":>3} {"eff. rank":>9} {"entropy":>7} {"top-1":>6} {"logit var.":>10}   '
          f'{"PR of q":>16} {"PR of k":>16} {"action q":>8} {"action k":>8}')
    for name, layer in lines:
        for i in range(len(layer['entropy'])):
            m = {k: v[i].mean() if v.dim() == 2 else v.mean() for k, v in layer.items() if 'log_scale' not in k}
            line = (f'{name if i == 0 else "":>10} {i + 1:>3} {m["effective_rank"]:9.2f} {m["entropy"]:7.4f} {m["top1"]:6.4f} '
                    f'{m["logit_variance"]:10.4g}')
            if i == 0:  # q and k are those of the whole head
                pr = [f'{m[f"pr_{side}_before"]:6.2f} -> {m[f"pr_{side}_after"]:6.2f}' for side in 'qk']
                line += f'   {pr[0]:>16} {pr[1]:>16} {m["action_q"]:8.4f} {m["action_k"]:8.4f}'
            print(line)
    if 'log_scale_q_mean' in layers[0]:
        print(f'{"layer":>10} {"round":>5}   {"log-scale of q":>16} {"at clamp":>8}   {"log-scale of k":>16} {"at clamp":>8}')
        for name, layer in lines:
            for i in range(len(layer['log_scale_q_mean'])):
                line = f'{name if i == 0 else "":>10} {i + 1:>5}'
                for side in 'qk':
                    mean, std, clamped = (layer[f'log_scale_{side}_{key}'][i].mean() for key in ('mean', 'std', 'clamped'))
                    line += f'   {f"{mean:.4f} ± {std:.4f}":>16} {clamped:8.2%}'
                print(line)


def draw(prefix, layers, pictures):
    import matplotlib
    matplotlib.use('Agg')  # needs no display
    from matplotlib import pyplot
    for name, title in pictures.items():
        grids = [torch.atleast_2d(layer[name]) for layer in layers]       # each (maps or 1, heads)
        labels = [f'{i}, map {m + 1}' if len(grid) > 1 else str(i) for i, grid in enumerate(grids) for m in range(len(grid))]
        grid = torch.cat(grids).numpy()
        figure, axes = pyplot.subplots(figsize=(3 + 0.3 * grid.shape[1], 1.5 + 0.25 * len(grid)), layout='constrained')
        figure.colorbar(axes.imshow(grid, aspect='auto', interpolation='nearest'))
        axes.set(title=title, xlabel='head', ylabel='layer', xticks=range(grid.shape[1]))
        axes.set_yticks(range(len(labels)), labels)
        figure.savefig(f'{prefix}_{name}.png', dpi=120)
        pyplot.close(figure)


def plain(value):
    """Tensors as lists of six digits, nan and infinity, which JSON has not, as None."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list):
        return [plain(v) for v in value]
    return float(f'{value:.6g}') if math.isfinite(value) else None


def main(argv):
    cfg = SimpleNamespace(**configure(defaults, argv))
    for key, least in dict(windows=0, seed=0, batch_size=1).items():
        if getattr(cfg, key) < least:
            refuse(f'--{key}={getattr(cfg, key)}: expected {least} or more')
    if cfg.text and cfg.dataset:
        refuse(f'--text={cfg.text} and --dataset={cfg.dataset}: expected one of them')
    files = [('json', cfg.json)] if cfg.json else []
    files += [('png', f'{cfg.png}_{name}.png') for name in PICTURES | COUPLED] if cfg.png else []
    for key, file in files:
        if os.path.lexists(file):
            refuse(f'--{key}={getattr(cfg, key)}: {file} exists and would be overwritten; another name, or remove it')
        if not os.access(Path(file).parent, os.W_OK):
            refuse(f'--{key}={getattr(cfg, key)}: expected a name in a folder that is there and writable')
    if cfg.png and not find_spec('matplotlib'):
        refuse(f'--png={cfg.png} needs matplotlib: pip install matplotlib')
    device, autocast = set_up(cfg.device, cfg.dtype)
    model, state = load(cfg.ckpt, device)
    ids, source, chosen = read_windows(cfg, model, state)

    print(f'{cfg.ckpt}: {model.config.attention} attention, coupling {model.config.coupling}, step {state["iter_num"]}; '
          f'{len(ids)} windows of {ids.shape[1]} tokens of {source}')
    layers = measure(model, ids, cfg.batch_size, device, autocast)
    third = last_third(layers)
    print_table(layers, {'all': layers, 'last third': third})
    summary = dict(all=summarize(layers), last_third=summarize(third))
    if summary['all']['underflow']:
        print(f'note: {summary["all"]["underflow"]:.2%} of the weights underflow: the logit variance is a lower bound')
    document = dict(ckpt=cfg.ckpt, step=state['iter_num'], config=vars(cfg), model=state['model_args'], trained_on=state['data'],
                    run_seed=state['config']['seed'], source=source, windows=chosen, tokens=ids.shape[1],
                    summary={key: {name: plain(value) for name, value in means.items()} for key, means in summary.items()},
                    layers=[{name: plain(value) for name, value in layer.items()} for layer in layers])
    if cfg.json:
        Path(cfg.json).write_text(dumps(document) + '\n', encoding='utf-8')
    if cfg.png:
        draw(cfg.png, layers, PICTURES | (COUPLED if model.config.coupling != 'none' else {}))
    print(dumps(document))


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except (ConfigError, prepare.DataError, OSError, MemoryError, torch.OutOfMemoryError) as e:
        refuse(str(e) or 'out of memory, a smaller --batch_size helps')
    except KeyboardInterrupt:
        sys.exit(130)
