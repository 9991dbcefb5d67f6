"""
Report a study that sweep.py ran: tables, tests and figures, from its run folders alone.

    python experiments/report.py experiments/studies/cpu_study.py
    python experiments/report.py experiments/studies/mqar.py --scale=full --to=mqar_report

Writes report.md, report.json, curves.png and, where cells are compared, gap.png, forest.png and cost.png to --to, and
prints report.md. A run that is missing or unfinished is left out, and named. Needs scipy and matplotlib.

Base and treatment share initial weights and batches at one seed. So beside the papers' test, a one-sided Welch test that
takes all runs as independent, stand tests of the differences within seeds, which may see smaller effects.
"""
import json
import math
import os
import platform
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import train
from compare import bootstrap
from configurator import ConfigError, configure
from studies import study as studies
from train import refuse

try:
    import matplotlib
    import scipy
    from matplotlib.figure import Figure  # without pyplot a figure has no window: savefig draws with Agg
    from scipy import optimize, stats
except ImportError as e:
    sys.exit(f'error: {e}; pip install scipy matplotlib')

scale = 'cpu'              # of the study's scales
out = 'out/studies'        # where sweep.py has put the runs
to = ''                    # folder to write to; '': experiments/results/STUDY_SCALE
defaults = {k: v for k, v in globals().items() if k[0] != '_' and type(v) in (bool, int, float, str)}

FILES = 'report.md', 'report.json', 'curves.png', 'gap.png', 'forest.png', 'cost.png'
HIGHER = 'lambada', 'hellaswag', 'mqar'  # tasks whose measures are accuracies; of all other measures lower is better
SAME = 'ppl.nats_per_token', 'ppl.bits_per_byte', 'ppl.perplexity_per_word'  # order runs as ppl.perplexity_per_token does
RESAMPLES = 10000  # of the bootstrap


def is_higher_better(measure: str) -> bool:
    return measure.partition('.')[0] in HIGHER

# ----------------------------------------------------------------------------------------------------------------------
# statistics: of one value a seed, at the end of training. Standard deviations are sample ones (ddof=1).

def welch_from_stats(mean_a, std_a, n_a, mean_b, std_b, n_b):
    """(b - a, one-sided Welch p for 'b is lower', Cohen's d with the pooled std, positive where b is lower).

    The papers' test: scipy.stats.ttest_ind(b, a, equal_var=False, alternative='less') is the same from the values.
    """
    p = stats.ttest_ind_from_stats(mean_b, std_b, n_b, mean_a, std_a, n_a, equal_var=False, alternative='less').pvalue
    pooled = ((n_a - 1) * std_a**2 + (n_b - 1) * std_b**2) / (n_a + n_b - 2)
    return mean_b - mean_a, p, (mean_a - mean_b) / pooled**0.5


def summary(values) -> dict:
    """mean, std (None of one value) and n."""
    values = np.asarray(values, dtype=float)
    return dict(mean=float(values.mean()), std=float(values.std(ddof=1)) if len(values) > 1 else None, n=len(values))


def t_interval(values):
    """95% interval of the mean of normal values; None of one value."""
    s = summary(values)
    if s['n'] > 1:
        half = stats.t.ppf(0.975, s['n'] - 1) * s['std'] / math.sqrt(s['n'])
        return [float(s['mean'] - half), float(s['mean'] + half)]


def effect(base, treatment, higher=False):
    """What the treatment changes: percent of the base; of an accuracy, percentage points."""
    return 100 * (treatment - base) if higher else 100 * (treatment / base - 1)


def compare_cells(base: dict, treatment: dict, family: int, higher=False) -> dict:
    """The tests of one comparison, from {seed: value} of both cells; None where the seeds are too few or do not differ.

    Every p is one-sided, for 'the treatment is better': lower, or with `higher` higher; d is positive where it is.
    p_bonferroni is for `family` comparisons. `paired` is over the seeds that both have.
    """
    a, b = summary(list(base.values())), summary(list(treatment.values()))
    result = dict(difference=b['mean'] - a['mean'], n=[a['n'], b['n']], p=None, p_bonferroni=None, d=None, paired=None)
    if a['std'] is not None and b['std'] is not None and a['std'] + b['std'] > 0:
        sign = -1 if higher else 1
        _, p, d = welch_from_stats(sign * a['mean'], a['std'], a['n'], sign * b['mean'], b['std'], b['n'])
        result |= dict(p=float(p), p_bonferroni=float(min(1, family * p)), d=float(d))
    if seeds := sorted(base.keys() & treatment.keys()):
        x, y = (np.array([cell[seed] for seed in seeds], dtype=float) for cell in (base, treatment))
        s, percent = summary(y - x), effect(x, y, higher)
        paired = dict(seeds=seeds, differences=(y - x).tolist(), **s, p=None, p_bonferroni=None, bootstrap=None, variance_ratio=None,
                      t=t_interval(y - x), effects=percent.tolist(), effect=float(percent.mean()), effect_t=t_interval(percent))
        if s['std']:
            p = float(stats.ttest_rel(y, x, alternative='greater' if higher else 'less').pvalue)
            paired |= dict(p=p, p_bonferroni=min(1.0, family * p),
                           bootstrap=[float(z) for z in bootstrap(y - x, np.ones(len(x)), RESAMPLES, 0)[1:]],
                           variance_ratio=float(s['std']**2 / (x.var(ddof=1) + y.var(ddof=1))))
        result['paired'] = paired
    return result


def detectable(std, n: int, alpha=0.05, power=0.8) -> float:
    """The smallest true difference that a one-sided paired t-test over n seeds finds with probability `power`.

    `std` is that of the paired differences; without any help of the pairing, sqrt(2) times that of a cell.
    """
    t = stats.t.isf(alpha, n - 1)
    def excess(shift):  # under a shift of so many standard errors, t is noncentral
        return stats.nct.sf(t, n - 1, shift) - power
    high = 1
    while excess(high) < 0:
        high *= 2
    return float(optimize.brentq(excess, 0, high) * std / math.sqrt(n))

# ----------------------------------------------------------------------------------------------------------------------
# the run folders

class LeftOut(Exception):
    """Why a run or its evaluation is not in the report."""


def read_run(run, base: dict) -> SimpleNamespace:
    """A finished run: head (its line of settings), commits, tok_s (median), curve {step: val_loss}, end (its last step), values.

    Settings are those of study.Run on top of `base`. The last line may be half a line, of a run that was killed.
    """
    file = run.folder / 'metrics.jsonl'
    if not file.is_file():
        raise LeftOut('no run')
    heads, curve, perplexity, speeds = [], {}, {}, []
    lines = file.read_text(encoding='utf-8', errors='replace').rstrip('\n').split('\n')
    for i, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if 'config' in record:
                heads.append(record)
            elif 'val_loss' in record:
                curve[record['step']], perplexity[record['step']] = record['val_loss'], record['val_perplexity']
            elif 'tok_s' in record:
                speeds.append(record['tok_s'])
        except (ValueError, TypeError, LookupError):
            if i < len(lines):
                raise LeftOut(f'line {i} of metrics.jsonl is none of train.py') from None
    if not heads:
        raise LeftOut('metrics.jsonl has no line with the settings')
    wanted, config = base | run.settings, heads[-1]['config']
    for key, value in wanted.items():
        if (key not in train.MAY_CHANGE or key == 'dataset') and config.get(key) != value:
            raise LeftOut(f'another run: {key} = {config.get(key)!r}, in the study {value!r}; move it away')
    end = wanted['max_iters']
    if end not in curve or max(curve) > end:
        raise LeftOut(f'not finished: evaluated at step {max(curve, default=0):,} of {end:,}')
    return SimpleNamespace(head=heads[-1], commits=list(dict.fromkeys(head['commit'] for head in heads)), end=end,
                           curve=dict(sorted(curve.items())), tok_s=float(np.median(speeds)) if speeds else None,
                           values=dict(val_perplexity=perplexity[end]))


def read_scores(file: Path, end: int, measure: str) -> dict:
    """{'task.measure': value} of what evaluate.py --json wrote; a task's only measure is called 'task', unless `measure` is longer."""
    try:
        document = json.loads(file.read_text(encoding='utf-8'))
        step, results = document['step'], document['results']
        scores = {f'{task}.{name}': float(row['value']) for task, rows in results.items() for name, row in rows.items()}
        alone = {f'{task}.{name}': task for task, rows in results.items() if len(rows) == 1 for name in rows}
    except FileNotFoundError:
        raise LeftOut('no evaluate.json') from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:
        raise LeftOut(f'evaluate.json is none of evaluate.py --json ({type(e).__name__}: {e})') from None
    if step != end:
        raise LeftOut(f'evaluate.json is of step {step:,}, the run ended at {end:,}')
    return {name if name == measure else alone.get(name, name): value for name, value in scores.items()}


def read_runs(study):
    """({cell: {seed: run}} of the finished runs, {'cell/seed_S': why it, or its evaluation, is left out})."""
    runs, left_out = {}, {}
    for run in study.runs:
        try:
            runs.setdefault(run.cell, {})[run.seed] = done = read_run(run, study.base)
            if study.tasks:
                done.values |= read_scores(run.folder / 'evaluate.json', done.end, study.measure)
        except LeftOut as e:
            left_out[f'{run.cell}/seed_{run.seed}'] = str(e)
    return {cell: runs[cell] for cell in study.cells if runs.get(cell)}, left_out


def values_of(runs, cell, measure) -> dict:
    """{seed: value} of the finished runs of a cell that have the measure."""
    return {seed: run.values[measure] for seed, run in runs.get(cell, {}).items() if measure in run.values}


def tests_of(study, runs, measure) -> dict:
    """{(base, treatment): compare_cells(...)} where both have a run."""
    both = {(b, t): (values_of(runs, b, measure), values_of(runs, t, measure)) for b, t in study.comparisons}
    return {pair: compare_cells(*values, len(study.comparisons), is_higher_better(measure))
            for pair, values in both.items() if all(values)}


def speed(runs, cell):
    """Median of the seeds' median tokens/s, or None."""
    speeds = [run.tok_s for run in runs.get(cell, {}).values() if run.tok_s]
    return float(np.median(speeds)) if speeds else None


def gaps(runs, base, treatment) -> dict:
    """{seed: {step: 100 * (perplexity of the treatment / that of the base - 1)}} from the first evaluation after step 0 on."""
    one, two = runs.get(base, {}), runs.get(treatment, {})
    return {seed: {step: 100 * math.expm1(two[seed].curve[step] - one[seed].curve[step])
                   for step in one[seed].curve if step and step in two[seed].curve} for seed in sorted(one.keys() & two.keys())}


def mean_by_step(curves) -> dict:
    """{step: (mean, min, max)} at the steps that all curves {step: value} have."""
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    columns = {step: [curve[step] for curve in curves] for step in steps}
    return {step: (float(np.mean(c)), min(c), max(c)) for step, c in columns.items()}

# ----------------------------------------------------------------------------------------------------------------------
# report.md

def table(header, rows) -> str:
    lines = [header, ['---'] + ['---:'] * (len(header) - 1), *rows]
    return '\n'.join('| ' + ' | '.join(map(str, line)) + ' |' for line in lines) + '\n'


def number(x, decimals: int, sign='') -> str:
    return '–' if x is None else f'{x:{sign}.{decimals}f}'


def p_value(p) -> str:
    return '–' if p is None else '<0.0001' if p < 1e-4 else f'{p:.2g}'


def interval(pair, decimals: int) -> str:
    return '–' if pair is None else f'{pair[0]:+.{decimals}f} to {pair[1]:+.{decimals}f}'


def plus_minus(mean, std, decimals: int) -> str:
    return number(mean, decimals) + (f' ± {std:.{decimals}f}' if std is not None else '')


def label(base, treatment) -> str:
    """'treatment − base', after the corpus or size, the part before the last /, if they share one."""
    (group, _, a), (same, _, b) = base.rpartition('/'), treatment.rpartition('/')
    return f'{group}: {b} − {a}' if group and group == same else f'{treatment} − {base}'


def published_of(study, cell):
    """(mean, std or None) of the paper, or (None, None)."""
    figure = study.published.get(cell)
    return tuple(figure) if isinstance(figure, (tuple, list)) else (figure, None)


def measure_section(study, runs, measure, tests) -> str:
    """The tables of one measure: cells, Welch tests, paired tests."""
    cells = {cell: summary(list(v.values())) for cell in study.cells if (v := values_of(runs, cell, measure))}
    decimals = 2 if max(abs(s['mean']) for s in cells.values()) >= 10 else 3
    main, unit = measure == study.measure, 'points' if is_higher_better(measure) else '%'
    publish = main and bool(study.published)
    text = f'## {measure}, {"higher" if is_higher_better(measure) else "lower"} is better\n\n'
    rows = []
    for cell in study.cells if main else cells:
        s = cells.get(cell, dict(mean=None, std=None, n=0))
        counts = {run.head['parameters'] for run in runs.get(cell, {}).values()}
        rows.append([cell, ', '.join(f'{n:,}' for n in sorted(counts)) or '–', s['n'], plus_minus(s['mean'], s['std'], decimals)]
                    + [plus_minus(*published_of(study, cell), decimals)] * publish + [number(speed(runs, cell), 0, ',')])
    header = ['cell', 'parameters', 'seeds', f'ours, scale {study.scale}'] + ["published: the papers' model and data"] * publish
    text += table(header + ['tokens/s'], rows)
    if not tests:
        return text
    rows, paired_rows = [], []
    for (base, treatment), test in tests.items():
        before, after = published_of(study, base)[0], published_of(study, treatment)[0]
        theirs = effect(before, after, is_higher_better(measure)) if publish and None not in (before, after) else None
        name, n = label(base, treatment), test['n']
        rows.append([name, f'{n[1]}, {n[0]}', number(test['difference'], decimals + 1, '+'), p_value(test['p']),
                     p_value(test['p_bonferroni']), number(test['d'], 2)])
        if pair := test['paired']:
            paired_rows.append([name, pair['n'], number(pair['mean'], decimals + 1, '+'), p_value(pair['p']),
                                p_value(pair['p_bonferroni']), interval(pair['t'], decimals + 1),
                                interval(pair['bootstrap'], decimals + 1), number(pair['variance_ratio'], 2),
                                f'{pair["effect"]:+.2f} {unit}']
                               + [number(theirs, 2, '+') + (f' {unit}' if theirs is not None else '')] * publish)
    corrected = f'p × {len(study.comparisons)}'  # Bonferroni
    text += '\nWelch, one-sided; d by the pooled std, positive where the treatment is better:\n\n'
    text += table(['treatment − base', 'seeds', 'difference', 'p', corrected, 'd'], rows)
    if paired_rows:
        text += '\nPaired by seed (equal initial weights, equal batches), one-sided t-test:\n\n'
        text += table(['treatment − base', 'pairs', 'difference', 'p', corrected, '95% t', '95% bootstrap', 'variance ratio', 'ours']
                      + ['published'] * publish, paired_rows)
    return text


def budget_section(study, runs) -> str:
    """The gap during training, in the shape of [v2]'s Table 13."""
    means = {(b, t): mean_by_step(list(gaps(runs, b, t).values())) for b, t in study.comparisons}
    steps = sorted(set().union(*means.values()))
    if not steps:
        return ''
    means = {pair: gap for pair, gap in means.items() if gap}
    rows = [[f'{step:,}'] + [number(gap[step][0], 2, '+') if step in gap else '–' for gap in means.values()] for step in steps]
    return ('## Gap in validation perplexity by updates, %\n\nPaired by seed, mean over seeds.\n\n'
            + table(['updates'] + [label(b, t) for b, t in means], rows))


def power_rows(study, runs, tests) -> list:
    """(what varies, std, mean of the base) of each base and each comparison, of the study's measure."""
    rows = []
    for base in dict.fromkeys(base for base, _ in study.comparisons):
        s = summary(v) if (v := list(values_of(runs, base, study.measure).values())) else dict(std=None)
        if s['std']:
            rows.append((f'√2 × std of {base}', math.sqrt(2) * s['std'], s['mean']))
    for (base, treatment), test in tests.items():
        if test['paired'] and test['paired']['std']:
            mean = summary(list(values_of(runs, base, study.measure).values()))['mean']
            rows.append((f'std of the differences, {label(base, treatment)}', test['paired']['std'], mean))
    return rows


def power_section(study, rows) -> str:
    def cell(std, mean, n):
        delta = detectable(std, n)
        relative = f'{100 * delta:.2f} points' if is_higher_better(study.measure) else f'{100 * delta / mean:.2f}%'
        return f'{delta:.3g} ({relative})'
    counts = 3, 5, 10, 20
    body = table(['noise', 'std'] + [f'{n} seeds' for n in counts],
                 [[name, f'{std:.3g}'] + [cell(std, mean, n) for n in counts] for name, std, mean in rows])
    return (f'## The smallest difference in {study.measure} that would be found\n\nTrue differences that a one-sided paired t-test '
            'at 5% finds with probability 80%. Rows with √2 take pairing to be of no help; those of the differences rest on a std that '
            f'few seeds give only roughly.\n\n{body}') if rows else ''


def markdown(study, runs, left_out, measures, tests, command, figures) -> str:
    def distinct(what):
        return '; '.join(sorted({str(what(run)) for cell in runs.values() for run in cell.values()}))

    def tokens(config):
        return config['batch_size'] * config['gradient_accumulation_steps'] * config['block_size']
    text = f'# {study.name}, scale {study.scale}\n\n{study.title}\n\n'
    text += f'{sum(map(len, runs.values()))} of {len(study.runs)} runs are in this report. '
    text += '. '.join(f'{name}: {distinct(what)}' for name, what in {
        'Data': lambda run: run.head['config']['dataset'], 'Updates': lambda run: f'{run.end:,}',
        'Tokens an update': lambda run: f'{tokens(run.head["config"]):,}', 'Config': lambda run: study.config,
        'Device': lambda run: '{processes} x {device}, {dtype}'.format(**run.head),
        'torch': lambda run: run.head['versions']['torch'], 'Commit': lambda run: ', '.join(map(str, run.commits))}.items()) + '.\n\n'
    if left_out:
        text += 'Left out:\n\n' + ''.join(f'- {name}: {why}\n' for name, why in left_out.items())
        text += f'\nTo run them: `{command}`\n\n'
    text += '± is the sample standard deviation over seeds. '
    if study.published:
        text += ("Published figures are of the papers' model size, data and length of training; they stand beside ours for sign and "
                 'order, and enter none of our numbers. ')
    text += 'Tokens/s is the median of the log lines; where runs shared a machine, `bench.py` is the measure of cost.\n\n'
    if study.comparisons:
        text += (f'p × {len(study.comparisons)} is corrected for the comparisons of the study (Bonferroni). A variance ratio, '
                 'var(difference) / (var(treatment) + var(base)), below 1 means that pairing removes noise. With 3 to 5 seeds the '
                 'percentile bootstrap is coarse: it draws from the differences seen only, and with 3 it is the span from the smallest '
                 'to the largest. The t interval takes the differences to be normal.\n\n')
    sections = [measure_section(study, runs, measure, tests[measure]) for measure in measures]
    sections += [budget_section(study, runs), power_section(study, power_rows(study, runs, tests[study.measure]))]
    sections.append('## Figures\n\n' + '\n'.join(f'![{file[:-4]}]({file})' for file in figures) + '\n')
    return text + '\n'.join(filter(None, sections))

# ----------------------------------------------------------------------------------------------------------------------
# figures; None where nothing is compared

def panels(n: int, sharey=False):
    """(figure, list of n axes), up to three beside each other."""
    columns = min(3, n)
    rows = -(-n // columns)
    fig = Figure(figsize=(max(5, 4 * columns), 3.2 * rows), layout='constrained')
    axes = fig.subplots(rows, columns, squeeze=False, sharey=sharey).flatten().tolist()
    for ax in axes[n:]:
        ax.remove()
    return fig, axes[:n]


def draw_curves(study, runs) -> Figure:
    """Validation perplexity by step after step 0: mean, span of the seeds. A panel a corpus or size, the part before the last /."""
    groups = {}
    for cell in study.cells:
        if cell in runs:
            groups.setdefault(cell.rpartition('/')[0], []).append(cell)
    fig, axes = panels(len(groups))
    for ax, (group, cells) in zip(axes, groups.items()):
        for cell in cells:
            curve = mean_by_step([{step: math.exp(loss) for step, loss in run.curve.items() if step}
                                  for run in runs[cell].values()])
            mean, low, high = np.array(list(curve.values())).reshape(-1, 3).T
            line, = ax.plot(list(curve), mean, lw=1.2, label=f'{cell.rpartition("/")[2]} ({len(runs[cell])})')
            ax.fill_between(list(curve), low, high, color=line.get_color(), alpha=0.2, lw=0)
        ax.set(title=group, xlabel='updates', ylabel='validation perplexity', yscale='log')
        ax.yaxis.set_major_formatter('{x:g}')
        ax.yaxis.set_minor_formatter('{x:g}')
        ax.tick_params(axis='y', which='both', labelsize=7)
        ax.legend(fontsize=7, title='mean, min to max (seeds)', title_fontsize=7)
    return fig


def draw_gap(study, runs) -> Figure | None:
    """Perplexity of the treatment relative to the base by step, a panel for each comparison: each seed, and their mean."""
    every = {pair: curves for pair in study.comparisons if (curves := gaps(runs, *pair))}
    if not every:
        return None
    fig, axes = panels(len(every), sharey=True)
    for ax, ((base, treatment), curves) in zip(axes, every.items()):
        for curve in curves.values():
            ax.plot(list(curve), list(curve.values()), color='0.6', lw=0.7)
        mean = mean_by_step(list(curves.values()))
        ax.plot(list(mean), [m for m, _, _ in mean.values()], color='C0', lw=2, marker='.')
        ax.axhline(0, color='black', lw=0.7, ls=':')
        ax.set(xlabel='updates', ylabel='gap in perplexity, %')
        ax.set_title(label(base, treatment), fontsize=9)
    return fig


def draw_forest(study, tests) -> Figure | None:
    """The effect of each comparison in the study's measure: paired by seed, mean and 95% t interval."""
    rows = {pair: test['paired'] for pair, test in tests.items() if test['paired']}
    if not rows:
        return None
    fig = Figure(figsize=(8, 1.2 + 0.3 * len(rows)), layout='constrained')
    ax = fig.add_subplot()
    for y, pair in enumerate(rows.values()):
        low, high = pair['effect_t'] or [pair['effect']] * 2
        ax.plot([low, high], [y, y], color='C0', lw=1.5)
        ax.plot(pair['effects'], [y] * pair['n'], '|', color='0.5')
        ax.plot(pair['effect'], y, 'o', color='C0')
    ax.axvline(0, color='black', lw=0.7, ls=':')
    ax.set_yticks(range(len(rows)), [f'{label(b, t)} ({pair["n"]})' for (b, t), pair in rows.items()], fontsize=8)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_title('mean, 95% t interval and single seeds (their number)', fontsize=9)
    ax.set_xlabel(f'difference in {study.measure}, ' + ('points' if is_higher_better(study.measure) else '%'))
    return fig


def draw_cost(study, runs, tests) -> Figure | None:
    """What a treatment costs against what it gains, both relative to its base."""
    higher = is_higher_better(study.measure)
    rows = [(speed(runs, t) / speed(runs, b), test['paired']['effect'] * (1 if higher else -1), label(b, t))
            for (b, t), test in tests.items() if test['paired'] and speed(runs, t) and speed(runs, b)]
    if not rows:
        return None
    fig = Figure(figsize=(6, 4.5), layout='constrained')
    ax = fig.add_subplot()
    for i, (x, y, name) in enumerate(rows):
        ax.plot(x, y, 'os^vD<>'[i // 10 % 7], color=f'C{i % 10}', label=name)
    ax.axhline(0, color='black', lw=0.7, ls=':')
    ax.axvline(1, color='black', lw=0.7, ls=':')
    ax.set(xlabel='tokens/s, relative to the base',
           ylabel=f'gain in {study.measure}, ' + ('points' if higher else '%'))
    ax.legend(fontsize=7)
    return fig

# ----------------------------------------------------------------------------------------------------------------------
# report.json

def document(study, runs, left_out, measures, tests) -> dict:
    """All that report.md rests on: the values and curves of each run, the tests, and what made them."""
    def one(run):
        return dict(values=run.values, tok_s=run.tok_s, curve=list(run.curve.items()), commits=run.commits,
                    versions=run.head['versions'], device=run.head['device'], dtype=run.head['dtype'], processes=run.head['processes'])
    cells = {}
    for cell in study.cells:
        done = runs.get(cell, {})
        cells[cell] = dict(settings=study.cells[cell], published=study.published.get(cell),
                           parameters=next((run.head['parameters'] for run in done.values()), None), tok_s=speed(runs, cell),
                           summary={m: summary(list(v.values())) for m in measures if (v := values_of(runs, cell, m))},
                           seeds={seed: one(run) for seed, run in done.items()})
    packages = dict(python=platform.python_version(), **{m.__name__: m.__version__ for m in (np, scipy, matplotlib)})
    return dict(study=study.name, scale=study.scale, title=study.title, config=study.config, measure=study.measure,
                family=len(study.comparisons), left_out=left_out, packages=packages, cells=cells,
                comparisons={m: [dict(base=b, treatment=t, **test) for (b, t), test in tests[m].items()] for m in measures},
                gaps=[dict(base=b, treatment=t, seeds={seed: list(curve.items()) for seed, curve in gaps(runs, b, t).items()})
                      for b, t in study.comparisons],
                detectable=[dict(noise=name, std=std, seeds={n: detectable(std, n) for n in (3, 5, 10, 20)})
                            for name, std, _ in power_rows(study, runs, tests[study.measure])])

# ----------------------------------------------------------------------------------------------------------------------

def check_target(folder: Path, study):
    """Refuse to overwrite what is not an earlier report of the same study."""
    there = [file for file in FILES if (folder / file).exists()]
    try:
        old = json.loads((folder / 'report.json').read_text(encoding='utf-8'))
        same = (old['study'], old['scale']) == (study.name, study.scale)
    except (OSError, ValueError, LookupError, TypeError):
        same = False
    if there and not same:
        refuse(f'{folder} holds {", ".join(there)}, and not as a report on {study.name} at scale {study.scale}; give another '
               'folder: --to=FOLDER')
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        refuse(f'--to={folder}: expected a folder that can be made and written to')


def main(argv):
    cfg = SimpleNamespace(**configure(defaults, [arg for arg in argv if arg.startswith('-')]))
    paths = [arg for arg in argv if not arg.startswith('-')]
    if len(paths) != 1:
        refuse(f'expected one study such as experiments/studies/cpu_study.py, not {" and ".join(paths) or "none"}')
    study = studies.load(paths[0], cfg.scale, cfg.out)
    study.scale = cfg.scale
    command = f'python experiments/sweep.py {paths[0]} --scale={cfg.scale}' + (f' --out={cfg.out}' if cfg.out != out else '')
    runs, left_out = read_runs(study)
    if not runs:
        reasons = '\n  '.join(f'{name}: {why}' for name, why in list(left_out.items())[:5])
        refuse(f'no finished run of {study.name} in {study.folder}:\n  {reasons}\nTo run the study: {command}')
    have = dict.fromkeys(m for cell in runs.values() for run in cell.values() for m in run.values if m not in SAME)
    if study.measure not in have:
        refuse(f'no run in {study.folder} has the measure {study.measure} of {study.name}, only {", ".join(have)}. To score them: '
               f'{command}')
    target = Path(cfg.to or HERE / 'results' / f'{study.name}_{cfg.scale}')
    check_target(target, study)

    measures = [study.measure] + [m for m in have if m != study.measure]
    tests = {measure: tests_of(study, runs, measure) for measure in measures}
    drawn = (draw_curves(study, runs), draw_gap(study, runs), draw_forest(study, tests[study.measure]),
             draw_cost(study, runs, tests[study.measure]))
    figures = {name: figure for name, figure in zip(FILES[2:], drawn) if figure}
    text = markdown(study, runs, left_out, measures, tests, command, figures)
    data = json.dumps(document(study, runs, left_out, measures, tests), indent=1, allow_nan=False) + '\n'
    data = re.sub(r'\[[^]["{]*\]', lambda numbers: ' '.join(numbers[0].split()), data)  # a point of a curve on one line
    for name in FILES[2:]:  # an earlier report may have drawn more
        (target / name).unlink(missing_ok=True)
    for name, figure in figures.items():
        figure.savefig(target / name, dpi=120, metadata=dict(Software=None))
    (target / 'report.md').write_text(text, encoding='utf-8')
    (target / 'report.json').write_text(data, encoding='utf-8')
    print(f'{text}\n{target}: {", ".join([*FILES[:2], *figures])}')


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except (ConfigError, OSError) as e:
        refuse(e)
