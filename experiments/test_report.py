"""
Tests of report.py: python -m pytest -q experiments/test_report.py

Expected values are computed by hand in the comments, published by the papers, of printed tables of the t distribution, or of
a simulation. The run folders are written here, no model is trained.
"""
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
if not all(map(importlib.util.find_spec, ('scipy', 'matplotlib'))):
    pytest.skip('needs pip install scipy matplotlib', allow_module_level=True)
import matplotlib.image
import report
from studies import study as studies
from configurator import ConfigError
from scipy import stats

# ----------------------------------------------------------------------------------------------------------------------
# statistics

# [v2]'s one-sided Welch tests: base and treatment (mean, std), seeds, and what is published of them: difference, p, d
PUBLISHED = {
    'standard 60m': ((24.20, 0.13), (23.92, 0.04), 3, (-0.28, 0.005), (0.025, 0.0005), (3.09, 0.005)),
    'standard 150m': ((21.61, 0.03), (21.45, 0.06), 3, (-0.16, 0.005), (0.015, 0.0005), (3.39, 0.005)),
    'standard 455m': ((19.56, 0.10), (19.48, 0.07), 3, (-0.07, 0.005), (0.19, 0.005), (0.83, 0.005)),
    'diff 150m': ((21.10, 0.08), (20.92, 0.02), 3, (-0.17, 0.005), (0.024, 0.0005), (3.12, 0.005)),
    'diff 455m': ((18.89, 0.04), (18.79, 0.05), 6, (-0.10, 0.005), (0.003, 0.0005), (2.09, 0.005)),
    'diff rope 455m': ((19.50, 0.03), (19.20, 0.05), 3, (-0.30, 0.005), (0.0015, 0.00005), (6.95, 0.005)),
}

@pytest.mark.parametrize('name', PUBLISHED)
def test_published_welch_tests(name):
    """Means and stds are rounded to 0.01: some values within that rounding must give the published difference, p and d at once."""
    (mean_a, std_a), (mean_b, std_b), n, *published = PUBLISHED[name]
    error = np.linspace(-0.005, 0.005, 21)  # holds the corners and the centre; that of a difference of means is twice as large
    of_mean, of_a, of_b = np.meshgrid(2 * error, error, error)
    reached = report.welch_from_stats(mean_a, std_a + of_a, n, mean_b + of_mean, std_b + of_b, n)
    right = [np.abs(got - value) <= half + 1e-9 for got, (value, half) in zip(reached, published)]
    spans = [f'{value}: {got.min():.4g} to {got.max():.4g}' for got, (value, _) in zip(reached, published)]
    assert np.logical_and.reduce(right).any(), spans


BASE, TREATMENT = {1: 20.0, 2: 22.0, 3: 24.0}, {1: 19.0, 2: 20.0, 3: 24.0}  # means 22 and 21, variances 4 and 7
P_PAIRED = 0.5 - math.sqrt(0.6) / 2  # t = -sqrt(3) with 2 degrees of freedom, whose distribution is 1/2 + t / (2 sqrt(2 + t^2))

def test_a_comparison_by_hand():
    test = report.compare_cells(BASE, TREATMENT, family=2)
    assert test['difference'] == pytest.approx(-1) and test['n'] == [3, 3]
    assert test['d'] == pytest.approx(1 / math.sqrt((4 + 7) / 2))
    p = stats.ttest_ind([19, 20, 24], [20, 22, 24], equal_var=False, alternative='less').pvalue
    assert test['p'] == pytest.approx(p) and test['p_bonferroni'] == pytest.approx(2 * p)
    pair = test['paired']
    assert pair['differences'] == [-1, -2, 0] and (pair['mean'], pair['std'], pair['n']) == (-1, 1, 3)
    assert pair['p'] == pytest.approx(P_PAIRED) and pair['p_bonferroni'] == pytest.approx(2 * P_PAIRED)
    assert pair['variance_ratio'] == pytest.approx(1 / 11)
    half = 4.30265 / math.sqrt(3)  # t table, 97.5%, 2 degrees of freedom
    assert pair['t'] == pytest.approx([-1 - half, -1 + half], abs=1e-5)
    assert pair['bootstrap'] == [-2, 0]  # each of the ends has 1/27 > 2.5% of the draws
    assert pair['effects'] == pytest.approx([-5, -200 / 22, 0]) and pair['effect'] == pytest.approx(-(5 + 200 / 22) / 3)
    assert report.compare_cells(BASE, TREATMENT, family=100)['p_bonferroni'] == 1


def test_accuracies_turn_the_alternative_around():
    test = report.compare_cells({1: 0.5, 2: 0.6, 3: 0.7}, {1: 0.6, 2: 0.6, 3: 0.9}, family=1, higher=True)
    assert test['difference'] == pytest.approx(0.1) and test['paired']['effect'] == pytest.approx(10)
    assert test['paired']['p'] == pytest.approx(P_PAIRED)  # differences 0.1, 0, 0.2: mean 0.1, std 0.1, t = sqrt(3)
    assert test['d'] == pytest.approx(0.1 / math.sqrt((0.01 + 0.03) / 2))
    p = stats.ttest_ind([0.6, 0.6, 0.9], [0.5, 0.6, 0.7], equal_var=False, alternative='greater').pvalue
    assert test['p'] == pytest.approx(p)
    assert [m for m in ('val_perplexity', 'ppl.bits_per_byte', 'mqar', 'lambada.last_word') if report.is_higher_better(m)] == [
        'mqar', 'lambada.last_word']


def test_few_seeds():
    test = report.compare_cells({1: 20.0, 2: 22.0, 3: 24.0}, {2: 21.0, 3: 23.0, 4: 1.0}, family=1)
    assert test['n'] == [3, 3] and test['paired']['seeds'] == [2, 3]
    assert test['paired']['differences'] == [-1, -1] and test['paired']['p'] is None  # no spread, no test
    one = report.compare_cells({1: 20.0, 2: 22.0}, {1: 19.0}, family=1)
    assert one['difference'] == -2 and one['p'] is one['d'] is None
    assert one['paired']['mean'] == -1 and one['paired']['p'] is one['paired']['t'] is one['paired']['bootstrap'] is None
    assert report.compare_cells({1: 20.0}, {2: 19.0}, family=1)['paired'] is None


def test_detectable_against_published_sample_sizes():
    # one-sided 2.5%, power 80%, effect 0.5: n = 33.37 (R's pwr.t.test); one-sided 5%: n = 27 (G*Power)
    assert report.detectable(1, 34, alpha=0.025) < 0.5 < report.detectable(1, 33, alpha=0.025)
    assert report.detectable(1, 27) < 0.5 < report.detectable(1, 26)


@pytest.mark.parametrize('n, critical', [(3, 2.920), (5, 2.132)])  # t table, one-sided 5%
def test_detectable_against_simulation(n, critical):
    d = np.random.default_rng(0).normal(report.detectable(0.7, n), 0.7, size=(200_000, n))
    found = (d.mean(1) / (d.std(1, ddof=1) / math.sqrt(n)) > critical).mean()
    assert found == pytest.approx(0.8, abs=0.004)  # 4.5 standard errors

# ----------------------------------------------------------------------------------------------------------------------
# run folders, written by hand

STUDY = '''"""A toy of ours.

More about it."""
scales = {'cpu': dict(config='config/tiny.py', settings=dict(max_iters=20, eval_interval=10), seeds=[1, 2, 3])}
cells = {'toy/standard': dict(attention='standard', coupling='none'),
         'toy/alternating': dict(attention='standard', coupling='alternating'),
         'other/standard': dict(attention='standard', coupling='none', qk_norm=True)}
comparisons = [('toy/standard', 'toy/alternating'), ('toy/standard', 'other/standard')]
published = {'toy/standard': (24.20, 0.13), 'toy/alternating': 23.92}
measure = 'val_perplexity'
'''


def write(folder, lines, end='\n'):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'metrics.jsonl').write_text('\n'.join(lines) + end)


def lines_of(perplexities, config, speeds):
    """metrics.jsonl as train.py writes it; perplexities: {step: value}"""
    head = dict(step=0, config=config | dict(out_dir='/root/secret'), versions=dict(python='3.11', torch='2.13.0', numpy='2.0'),
                device='x86_64', dtype='float32', processes=1, commit='c0ffee', parameters=1234, flops_per_token=1)
    evaluations = [dict(step=step, val_loss=math.log(p), val_perplexity=p) for step, p in perplexities.items()]
    updates = [dict(step=5 * i, loss=1.0, lr=0.1, grad_norm=1.0, tok_s=speed, tflops=1, mfu=None)
               for i, speed in enumerate(speeds, 1)]
    return [json.dumps(record) for record in (head, evaluations[0], *updates, *evaluations[1:])]


class Toy:
    """The study above, and its runs: at step 10 a perplexity of 100 (toy/standard) or 90, at step 20 those above."""
    def __init__(self, folder):
        self.path, self.to, self.runs = str(folder / 'toy.py'), folder / 'to', folder / 'out' / 'studies' / 'toy' / 'cpu'
        Path(self.path).write_text(STUDY)
        study = studies.load(self.path, 'cpu')
        for cell, seed, _, settings in study.runs:
            end = (TREATMENT if cell == 'toy/alternating' else BASE)[seed]
            middle, speeds = (100, (100, 200, 900)) if cell == 'toy/standard' else (90, (50, 150, 160))
            write(self.runs / cell / f'seed_{seed}', lines_of({0: 4000, 10: middle, 20: end}, study.base | settings, speeds))

    def load(self):
        study = studies.load(self.path, 'cpu')
        return study, report.read_runs(study)[0]

    def report(self):
        report.main([self.path, f'--to={self.to}'])
        return json.loads((self.to / 'report.json').read_text())


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Toy(tmp_path)


def fails(*argv):
    with pytest.raises((SystemExit, ConfigError)) as e:
        report.main(list(argv))
    return str(e.value)


def test_report(toy, capsys):
    got = toy.report()
    printed, text = capsys.readouterr().out, (toy.to / 'report.md').read_text()
    assert text in printed
    # means and stds of the seeds, medians of tokens/s
    assert '| toy/standard | 1,234 | 3 | 22.00 ± 2.00 | 24.20 ± 0.13 | 200 |' in text
    assert '| toy/alternating | 1,234 | 3 | 21.00 ± 2.65 | 23.92 | 150 |' in text
    assert '| other/standard | 1,234 | 3 | 22.00 ± 2.00 | – | 150 |' in text
    assert ('| toy: alternating − standard | 3 | -1.000 | 0.11 | 0.23 | -3.484 to +1.484 | -2.000 to +0.000 | 0.09 | -4.70 % | -1.16 % |'
            in text)
    assert '\n| 10 | -10.00 |' in text and '\n| 20 | -4.70 |' in text  # the gap by step, the first comparison's
    for words in ('A toy of ours.', "ours, scale cpu | published: the papers'", '9 of 9 runs', 'Data: pydocs', 'Updates: 20.',
                  'Commit: c0ffee'):
        assert words in text
    assert 'More about it' not in text and 'Left out' not in text
    assert got['cells']['toy/alternating']['summary']['val_perplexity'] == pytest.approx(dict(mean=21, std=math.sqrt(7), n=3))
    assert got['cells']['toy/standard']['seeds']['2']['curve'] == [[0, math.log(4000)], [10, math.log(100)], [20, math.log(22)]]
    assert [got['cells']['toy/alternating']['seeds'][s]['values']['val_perplexity'] for s in '123'] == [19, 20, 24]
    first, second = got['comparisons']['val_perplexity']
    assert first['paired']['p'] == pytest.approx(P_PAIRED) and second['paired']['mean'] == 0 and got['family'] == 2
    for file in 'report.md', 'report.json':
        assert '/root' not in (toy.to / file).read_text() and str(toy.to.parent) not in (toy.to / file).read_text()
    for name in 'curves', 'gap', 'forest', 'cost':
        image = matplotlib.image.imread(toy.to / f'{name}.png')
        assert min(image.shape[:2]) > 100 and image[..., :3].std() > 0.01
    before = (toy.to / 'report.json').read_bytes()
    toy.report()  # over its own report: the same bytes
    assert (toy.to / 'report.json').read_bytes() == before
    assert sorted(file.name for file in toy.to.iterdir()) == sorted(report.FILES)


def test_nothing_compared_nothing_drawn(toy):
    """A figure of comparisons that an earlier report drew goes, too."""
    toy.report()
    study = re.sub(r'^comparisons = .*', 'comparisons = []', Path(toy.path).read_text(), flags=re.M)
    Path(toy.path).write_text(study)
    toy.report()
    assert sorted(file.name for file in toy.to.iterdir()) == ['curves.png', 'report.json', 'report.md']
    assert re.findall(r'\((\w+\.png)\)', (toy.to / 'report.md').read_text()) == ['curves.png']


def test_figures(toy):
    study, runs = toy.load()
    tests = report.tests_of(study, runs, 'val_perplexity')
    curves = report.draw_curves(study, runs)
    assert [ax.get_title() for ax in curves.axes] == ['toy', 'other'] and curves.axes[0].get_yscale() == 'log'
    assert curves.axes[0].lines[1].get_ydata() == pytest.approx([90, 21])
    assert len(curves.axes[0].collections) == 2 and len(curves.axes[1].lines) == 1
    gap = report.draw_gap(study, runs)
    mean = next(line for line in gap.axes[0].lines if line.get_marker() == '.')
    assert len(gap.axes) == 2 and list(mean.get_xdata()) == [10, 20]
    effects = np.array([-5, -200 / 22, 0])  # of the seeds, in percent
    assert mean.get_ydata() == pytest.approx([-10, effects.mean()])
    thin = [line.get_ydata()[-1] for line in gap.axes[0].lines if line.get_color() == '0.6']
    assert thin == pytest.approx(effects.tolist())
    ax, = report.draw_forest(study, tests).axes
    half = 4.30265 * effects.std(ddof=1) / math.sqrt(3)
    assert ax.lines[0].get_xdata() == pytest.approx([effects.mean() - half, effects.mean() + half], rel=1e-5)
    assert [text.get_text() for text in ax.get_yticklabels()] == ['toy: alternating − standard (3)', 'other/standard − toy/standard (3)']
    ax, = report.draw_cost(study, runs, tests).axes
    assert list(ax.lines[0].get_xdata()) == [150 / 200] and ax.lines[0].get_ydata() == pytest.approx([-effects.mean()])


def test_resumed_and_torn(toy):
    """Several lines of settings, of which the last holds, and half a line at the end."""
    folder = toy.runs / 'toy/standard/seed_1'
    first, *rest = (folder / 'metrics.jsonl').read_text().splitlines()
    old = json.loads(first)
    old['config']['max_iters'], old['commit'], old['device'] = 10, 'older', 'another'
    write(folder, [json.dumps(old), rest[0], first, *rest[1:], '{"step": 25, "lo'], end='')
    got = toy.report()
    seed = got['cells']['toy/standard']['seeds']['1']
    assert not got['left_out'] and seed['commits'] == ['older', 'c0ffee'] and seed['values'] == {'val_perplexity': 20}
    assert seed['device'] == 'x86_64'


def test_runs_left_out_are_named(toy, capsys):
    alternating, other = toy.runs / 'toy/alternating', toy.runs / 'other/standard'
    (alternating / 'seed_1/metrics.jsonl').unlink()
    lines = (alternating / 'seed_3/metrics.jsonl').read_text().splitlines()
    write(alternating / 'seed_3', lines[:-1] + [lines[-1][:20]], end='')  # killed in its last evaluation
    for seed, old, new in (1, '"coupling": "none"', '"coupling": "linear_mix"'), (2, '"val_loss"', 'val_loss'):
        file = other / f'seed_{seed}/metrics.jsonl'
        file.write_text(file.read_text().replace(old, new))
    got, text = toy.report(), capsys.readouterr().out
    why = got['left_out']
    assert list(why) == ['toy/alternating/seed_1', 'other/standard/seed_1', 'other/standard/seed_2', 'toy/alternating/seed_3']
    assert why['toy/alternating/seed_1'] == 'no run' and 'step 10 of 20' in why['toy/alternating/seed_3']
    assert "coupling = 'linear_mix'" in why['other/standard/seed_1'] and 'line 2' in why['other/standard/seed_2']
    assert all(f'- {name}: {reason}\n' in text for name, reason in why.items())
    assert '5 of 9 runs' in text and re.search(r'To run them: `python experiments/sweep.py \S*toy.py --scale=cpu`', text)
    assert '| toy/alternating | 1,234 | 1 | 20.00 |' in text
    first = got['comparisons']['val_perplexity'][0]
    assert first['n'] == [3, 1] and first['paired']['seeds'] == [2] and first['difference'] == -2


def test_tasks(toy, capsys):
    """Scores of evaluate.py: the study's measure is an accuracy, the others have a section each."""
    Path(toy.path).write_text(STUDY.replace("'val_perplexity'", "'lambada.last_token'\ntasks = 'ppl,lambada,mqar'")
                              .replace('(24.20, 0.13)', '0.259').replace('23.92', '0.269'))
    def value(x):
        return dict(value=x, se=None, n=9)
    for cell in 'toy/standard', 'toy/alternating', 'other/standard':
        for seed, x in enumerate((0.6, 0.6, 0.9) if cell == 'toy/alternating' else (0.5, 0.6, 0.7), 1):
            results = dict(ppl=dict(perplexity_per_token=value(20 + seed), nats_per_token=value(3.0)),
                           lambada=dict(last_token=value(x), last_word=value(0.0)), mqar=dict(kv4_len64=value(x)))
            (toy.runs / cell / f'seed_{seed}/evaluate.json').write_text(json.dumps(dict(step=20, results=results)))
    got, text = toy.report(), capsys.readouterr().out
    assert [line for line in text.splitlines() if line.endswith(' is better')] == [
        '## lambada.last_token, higher is better', '## val_perplexity, lower is better', '## ppl.perplexity_per_token, lower is better',
        '## lambada.last_word, higher is better', '## mqar, higher is better']
    assert '| toy/alternating | 1,234 | 3 | 0.700 ± 0.173 | 0.269 | 150 |' in text
    assert '+10.00 points | +1.00 points |' in text  # ours, and 0.269 - 0.259
    for measure in 'lambada.last_token', 'mqar':
        assert got['comparisons'][measure][0]['paired']['p'] == pytest.approx(P_PAIRED)  # 0.1, 0, 0.2, as above
    assert got['comparisons']['lambada.last_word'][0]['p'] is None  # all are equal
    # a run without scores, or with those of another step, keeps its perplexity
    folder = toy.runs / 'toy/standard'
    (folder / 'seed_1/evaluate.json').unlink()
    (folder / 'seed_2/evaluate.json').write_text(json.dumps(dict(step=10, results={})))
    (folder / 'seed_3/evaluate.json').write_text('[')
    got = toy.report()
    assert got['left_out']['toy/standard/seed_1'] == 'no evaluate.json' and 'step 10' in got['left_out']['toy/standard/seed_2']
    assert 'evaluate.py --json' in got['left_out']['toy/standard/seed_3']
    assert list(got['cells']['toy/standard']['summary']) == ['val_perplexity']


def test_mistakes_are_one_message(toy, tmp_path):
    assert 'not none' in fails() and 'not a.py and b.py' in fails('a.py', 'b.py')
    assert "'sclae'" in fails(toy.path, '--sclae=cpu')
    message = fails(toy.path, '--out=elsewhere')
    assert 'no finished run of toy' in message and f'python experiments/sweep.py {toy.path} --scale=cpu --out=elsewhere' in message
    assert 'toy/standard/seed_1: no run' in message and not (tmp_path / 'to').exists()
    assert 'expected a folder' in fails(toy.path, f'--to={toy.path}/x')
    toy.report()
    (toy.to / 'report.json').unlink()
    before = (toy.to / 'report.md').read_bytes()
    assert 'report.md' in fails(toy.path, f'--to={toy.to}') and (toy.to / 'report.md').read_bytes() == before  # whose report is it?
    Path(toy.path).write_text(STUDY.replace("'val_perplexity'", "'mqar'\ntasks = 'mqar'"))
    assert 'measure mqar' in fails(toy.path, f'--to={tmp_path}/new') and not (tmp_path / 'new').exists()


def test_runs_from_any_folder():
    done = subprocess.run([sys.executable, HERE / 'report.py', 'nowhere.py'], capture_output=True, text=True, cwd='/', timeout=120)
    assert done.returncode == 1 and done.stderr.startswith('error: nowhere.py') and 'Traceback' not in done.stderr
