"""
Compare two checkpoints on the same examples, from the files that evaluate.py --json=PATH wrote.

    python experiments/compare.py --a=standard.json --b=diff.json

For each measure: b - a with the standard error and the 95% interval of a paired bootstrap over examples (ppl: windows;
mqar: rows), and for right-or-wrong measures the exact McNemar test, two-sided, of the examples on which they disagree.
The error is that of drawing the examples; how much training with another seed would change is not in it.
"""
import math
import sys
from json import dumps, loads
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from configurator import ConfigError, configure

a = ''                     # the file of one checkpoint
b = ''                     # the file of the other
resamples = 10000          # of the bootstrap, >= 100
seed = 0                   # of the bootstrap, >= 0
defaults = {k: v for k, v in globals().items() if k[0] != '_' and type(v) in (bool, int, float, str)}


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p: are the only_a examples that only a got right as likely as the only_b that only b got right?"""
    n, k = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


def bootstrap(difference, weights, resamples: int, seed: int):
    """(standard error, low, high): of the weighted mean of `difference`, one value an example; 2.5% and 97.5% quantiles."""
    rng, n, means = np.random.default_rng(seed), len(difference), []
    for lo in range(0, resamples, chunk := max(1, 4_000_000 // n)):
        counts = rng.multinomial(n, np.full(n, 1 / n), size=min(chunk, resamples - lo))  # (draws, n) how often each is drawn
        means.append(counts @ (weights * difference) / (counts @ weights))
    means = np.concatenate(means)
    return means.std(ddof=1), *np.quantile(means, [0.025, 0.975])


def read(key: str, path: str) -> dict:
    if not path:
        sys.exit(f'error: --{key} is missing, expected a file of evaluate.py --json=PATH')
    try:
        document = loads(Path(path).read_text(encoding='utf-8'))
        return document if document['examples'] else document
    except (OSError, ValueError, KeyError, TypeError) as e:
        sys.exit(f'error: --{key}={path} is no file of evaluate.py --json=PATH ({type(e).__name__}: {e})')


def main(argv):
    cfg = SimpleNamespace(**configure(defaults, argv))
    if cfg.resamples < 100 or cfg.seed < 0:
        sys.exit(f'error: --resamples={cfg.resamples} --seed={cfg.seed}: expected at least 100 and 0')
    one, two = read('a', cfg.a), read('b', cfg.b)
    shared = [task for task in one['examples'] if task in two['examples']]
    if not shared:
        sys.exit(f'error: no task in common: {cfg.a} has {", ".join(one["examples"])}, {cfg.b} {", ".join(two["examples"])}')
    for task in shared:
        x, y = one['examples'][task], two['examples'][task]
        if differ := [key for key in x | y if key != 'values' and x.get(key) != y.get(key)]:
            sys.exit(f'error: {task}: not the same examples ({", ".join(differ)} differ); evaluate both on the same data with '
                     'the same --split, --limit, --seed and --stride')

    print(f'a: {one["ckpt"]}, step {one["step"]}\nb: {two["ckpt"]}, step {two["step"]}')
    print(f'{"task":10} {"measure":16} {"a":>9} {"b":>9} {"b - a ± s.e.":>19} {"95% interval":>19} {"McNemar p":>10} {"n":>7}')
    results = {}
    for task in shared:
        x, y = one['examples'][task], two['examples'][task]
        for measure, values in x['values'].items():
            u, v = np.array(values, dtype=float), np.array(y['values'][measure], dtype=float)
            w = np.array(x.get('weights', [1] * len(u)), dtype=float)
            means, difference = [(w * z).sum() / w.sum() for z in (u, v)], (w * (v - u)).sum() / w.sum()
            se, low, high = bootstrap(v - u, w, cfg.resamples, cfg.seed)
            only_a, only_b = int((u > v).sum()), int((v > u).sum())
            right_or_wrong = set(np.concatenate([u, v])) <= {0.0, 1.0}
            p = mcnemar(only_a, only_b) if right_or_wrong else None
            results.setdefault(task, {})[measure] = dict(
                a=means[0], b=means[1], difference=difference, se=se, low=low, high=high, n=len(u), p=p,
                **dict(only_a=only_a, only_b=only_b) if right_or_wrong else {})
            print(f'{task:10} {measure:16} {means[0]:9.4f} {means[1]:9.4f} {f"{difference:+.4f} ± {se:.4f}":>19} '
                  f'{f"{low:+.4f} {high:+.4f}":>19} {"" if p is None else f"{p:.3g}":>10} {len(u):7,}')
    print(dumps(dict(a=cfg.a, b=cfg.b, resamples=cfg.resamples, seed=cfg.seed, results=results)))


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except ConfigError as e:
        sys.exit(f'error: {e}')
