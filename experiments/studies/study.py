"""
A study: runs of train.py for cells x seeds, and which cells are compared. sweep.py runs it, report.py reads what came out.

A study is a Python file; the first paragraph of its docstring is its title. It assigns

    scales       name -> dict(config=, settings={}, seeds=[...], nproc=1): a config file, settings for every cell, processes a run;
                 `cells=` replaces the cells below at that scale
    cells        name -> settings of train.py, on top of those; `seeds` among them replaces the scale's. init_from='cell:NAME'
                 starts from the last.pt of another cell at the same seed (warm start)
    comparisons  [(base, treatment), ...]; pairs with a cell that the scale lacks are left out
    published    cell -> (mean, sample std) or mean, the paper's figure of the measure; {}
    measure      'val_perplexity' of the last evaluation in metrics.jsonl, or 'task' or 'task.measure' of evaluate.json
    tasks        of evaluate.py, run on each last.pt, separated by commas; ''
    corpora      dataset -> arguments of prepare.py, where they are not just its name; {}
    runs_of      another study: its scales, cells and runs, read for another table; `cells` is then a list of some of its names

A run lies in OUT/STUDY/SCALE/CELL/seed_SEED.
"""
import ast
import difflib
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'experiments')]
import train
from configurator import ConfigError, coerce, configure, run_config
from evaluate import TASKS
from model import GPTConfig

KEYS = dict(scales={}, cells={}, comparisons=[], published={}, measure='val_perplexity', tasks='', corpora={}, runs_of='')
SCALE_KEYS = dict(config='', settings={}, seeds=[], nproc=1, cells={})
OURS = 'out_dir', 'seed', 'overwrite', 'eval_only'  # settings that are sweep.py's to give


class Run(NamedTuple):
    cell: str
    seed: int
    folder: Path
    settings: dict  # of train.py, on top of the study's config file; init_from is the path of a last.pt


def need(ok, where, message):
    if not ok:
        raise ConfigError(f'{where}: {message}')


def check_keys(given: dict, known: dict, where):
    for key, value in given.items():
        near = difflib.get_close_matches(key, known, n=1, cutoff=0)
        need(key in known, where, f'unknown key {key!r}, did you mean {near[0]!r}? It has {", ".join(known)}')
        need(type(value) is type(known[key]), where, f'{key} = {str(value)[:80]!r}, expected a {type(known[key]).__name__}')


def find(path: str) -> Path:
    """The file of a study, sought here and beside this repository's train.py."""
    for folder in Path(), ROOT:
        if (folder / path).is_file():
            return folder / path
    known = [f'experiments/studies/{p.name}' for p in sorted(Path(__file__).parent.glob('*.py')) if p.name != 'study.py']
    raise ConfigError(f'{path}: no such study; there are\n  ' + '\n  '.join(known))


def read(path: Path) -> dict:
    """What the file assigns, every key present, types checked."""
    given = run_config(path)
    if given.get('runs_of'):
        need('scales' not in given, path, f'scales and runs_of: the scales are those of {given["runs_of"]}')
        check_keys(given, KEYS | dict(cells=[]), path)
        other = path.with_name(f'{given["runs_of"]}.py')
        need(other.is_file(), path, f'runs_of = {given["runs_of"]!r}, expected the name of a study beside it')
        source = read(other)
        need(not source['runs_of'], path, f'runs_of = {other.stem!r}, whose runs are those of {source["runs_of"]!r}: name that')
        chosen = given.get('cells') or list(source['cells'])
        lost = [cell for cell in chosen if cell not in source['cells']]
        need(not lost, path, f'cells: {other.name} has no {lost[:1]}, it has {", ".join(source["cells"])}')
        only = lambda cells: {cell: cells[cell] for cell in chosen if cell in cells}
        scales = {name: s | (dict(cells=only(s['cells'])) if 'cells' in s else {}) for name, s in source['scales'].items()}
        return KEYS | dict(corpora=source['corpora']) | given | dict(scales=scales, cells=only(source['cells']))
    check_keys(given, KEYS, path)
    study = KEYS | given
    need(study['scales'], path, "scales is missing, such as scales = {'cpu': dict(config='config/tiny.py', seeds=[1, 2, 3])}")
    for name, s in study['scales'].items():
        need(type(s) is dict, path, f'scale {name!r}: expected a dict of {", ".join(SCALE_KEYS)}')
        check_keys(s, SCALE_KEYS, f'{path}: scale {name!r}')
    return study


def check_seeds(seeds, where):
    need(type(seeds) is list and seeds and len(set(seeds)) == len(seeds) and all(type(s) is int and s >= 0 for s in seeds),
         where, f'seeds = {seeds!r}, expected a list of different integers >= 0 such as [1, 2, 3]')


def check_cell(name: str, settings, base: dict, where: str) -> dict:
    """The settings in the types of train.py's; refuse what train.py or the model would refuse."""
    need(re.fullmatch(r'\w[\w.+-]*(/\w[\w.+-]*)*', name) and 'seed_' not in name, where,
         'expected a name of letters, digits and _ . + - /, without seed_')
    need(type(settings) is dict, where, f'expected a dict of settings of train.py, not {str(settings)[:80]!r}')
    for key in settings:
        near = difflib.get_close_matches(key, base, n=1, cutoff=0)
        need(key in base, where, f'unknown key {key!r}, did you mean {near[0]!r}? (python train.py --help lists all keys)')
        need(key not in OURS, where, f'{key} is set by sweep.py')
    settings = {key: coerce(value, key, base, where) for key, value in settings.items()}
    need(settings.get('init_from', 'cell:').startswith('cell:'), where,
         f'init_from = {settings.get("init_from")!r}, expected cell:NAME, a cell to start from')
    now = base | settings
    try:
        GPTConfig(**{f.name: now[f.name] for f in fields(GPTConfig) if f.name in now}).validate()
    except ValueError as e:
        raise ConfigError(f'{where}: {e}') from None
    return settings


def load(path: str, scale: str, out='out/studies') -> SimpleNamespace:
    """The study at one scale, checked: name, path, title, config, nproc, base (the config file's settings), cells (name -> settings),
    seeds (of the scale), comparisons, published, measure, tasks, corpora, runs_of, folder, and runs, in the order in which to
    run them: seed by seed, and a cell after the cell that it starts from. Raises ConfigError."""
    path = find(path)
    study = SimpleNamespace(name=path.stem, path=path, **read(path))
    need(scale in study.scales, path, f'no scale {scale!r}, it has ' + ' '.join(f'--scale={name}' for name in study.scales))
    doc = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8')))
    need(doc, path, 'the docstring is missing, expected what the study is')
    study.title = ' '.join(doc.partition('\n\n')[0].split())
    chosen = SCALE_KEYS | study.scales[scale]
    study.config, study.seeds, study.nproc = chosen['config'], chosen['seeds'], chosen['nproc']
    study.folder = Path(out) / (study.runs_of or study.name) / scale
    at = f'{path}: scale {scale!r}'
    need(study.config, at, "config is missing, expected a config file such as 'config/tiny.py'")
    need(study.nproc > 0, at, f'nproc = {study.nproc}, expected a positive integer')
    check_seeds(study.seeds, at)
    study.base = configure(train.defaults, [study.config])

    # the cells of this scale
    everything = [study.cells] + [s['cells'] for s in study.scales.values() if 'cells' in s]
    given = chosen['cells'] or study.cells
    need(given, at, "no cells, expected such as cells = {'standard': dict(attention='standard')}")
    study.cells, seeds_of = {}, {}
    for name, own in given.items():
        where = f'{path}: cell {name!r}'
        seeds_of[name] = own.get('seeds', study.seeds) if type(own) is dict else []
        settings = own if type(own) is not dict else chosen['settings'] | {k: v for k, v in own.items() if k != 'seeds'}
        study.cells[name] = check_cell(name, settings, study.base, where)
        check_seeds(seeds_of[name], where)

    # the order: a cell after the one that it starts from
    order = {}

    def visit(name, path_here):
        source = study.cells[name].get('init_from', '')[len('cell:'):]
        if source:
            where = f'{path}: cell {name!r}: init_from = cell:{source}'
            need(source in study.cells, where, f'no such cell, expected one of {", ".join(study.cells)}')
            need(source not in path_here, where, 'the cells start from each other in a circle')
            lost = [seed for seed in seeds_of[name] if seed not in seeds_of[source]]
            need(not lost, where, f'{source} has no seed {lost}')
            visit(source, path_here + [source])
        order[name] = source
    for name in study.cells:
        visit(name, [name])
    folder_of = lambda name, seed: study.folder / name / f'seed_{seed}'
    study.runs = []
    for seed in dict.fromkeys(study.seeds + [seed for seeds in seeds_of.values() for seed in seeds]):
        for name, source in order.items():
            if seed in seeds_of[name]:
                init = dict(init_from=str(folder_of(source, seed) / 'last.pt')) if source else {}
                study.runs.append(Run(name, seed, folder_of(name, seed), study.cells[name] | init | dict(seed=seed)))

    # what is compared, with what, by which measure
    known = {name for cells in everything for name in cells}
    for pair in study.comparisons:
        need(type(pair) in (tuple, list) and len(pair) == 2 and all(type(x) is str and x in known for x in pair), path,
             f'comparisons: {pair!r}, expected (base, treatment), two of the cells {", ".join(sorted(known))}')
    for name, figure in study.published.items():
        need(name in known, path, f'published: no cell {name!r}, expected some of {", ".join(sorted(known))}')
        numbers = figure if type(figure) in (tuple, list) else (figure,)
        need(1 <= len(numbers) <= 2 and all(type(x) in (int, float) for x in numbers), path,
             f'published: {name!r}: {figure!r}, expected a mean or (mean, sample std)')
    study.comparisons = [tuple(pair) for pair in study.comparisons if set(pair) <= set(study.cells)]
    study.published = {name: figure for name, figure in study.published.items() if name in study.cells}
    tasks = study.tasks.split(',') if study.tasks else []
    for task in tasks:
        need(task in TASKS, path, f'tasks: {task!r} is unknown, expected some of {",".join(TASKS)}')
    need(study.measure == 'val_perplexity' or study.measure.partition('.')[0] in tasks, path,
         f'measure = {study.measure!r}, expected val_perplexity, or task.measure with a task of tasks = {study.tasks!r}')
    return study


def read_metrics(folder: Path) -> list[dict]:
    """The records of a run's metrics.jsonl; a line that a kill cut in two is left out."""
    records = []
    try:
        lines = (folder / 'metrics.jsonl').read_text(encoding='utf-8', errors='replace').splitlines()
    except FileNotFoundError:
        return records
    for line in lines:
        try:
            record = json.loads(line)
            records += [record] if type(record) is dict and 'step' in record else []
        except ValueError:
            pass
    return records
