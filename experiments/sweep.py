"""
Run a study: train.py for its cells x seeds, each run a process and a folder of its own.

    python experiments/sweep.py experiments/studies/cpu_study.py --dry_run=True       # what there is to do
    python experiments/sweep.py experiments/studies/cpu_study.py --jobs=2
    python experiments/sweep.py experiments/studies/wikitext103_60m.py --scale=full   # on 8 GPUs
    python experiments/report.py experiments/studies/cpu_study.py

A run lies in OUT/STUDY/SCALE/CELL/seed_SEED: what train.py writes, log.txt (all that its processes printed) and, if the study has
tasks, evaluate.json. The order is seed by seed, so that a study that was stopped has whole seeds. The same command goes on where
it was stopped or killed and does not repeat what is finished; a run that fails is reported, and the others go on.

A study's format, and how to write one: experiments/studies/study.py.
"""
import fcntl
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import torch

import prepare
import train
from configurator import ConfigError, configure
from studies.study import load, read_metrics

scale = 'cpu'              # one of the study's scales
jobs = 1                   # runs at a time; they share the CPU cores, or take different GPUs
nproc_per_node = 0         # processes of a run, on as many GPUs; 0: what the study says
out = 'out/studies'        # where the run folders go
seeds = ''                 # some of the study's seeds, separated by commas; '': all
cells = ''                 # some of its cells, and those they start from; '': all
dry_run = False            # True: print what there is to do, and do nothing
defaults = {k: v for k, v in globals().items() if k[0] != '_' and type(v) in (bool, int, float, str)}

TRAIN, EVALUATE = HERE.parent / 'train.py', HERE / 'evaluate.py'
POLL, REFRESH = 0.2, 600  # seconds between looks at the processes, and between progress lines
CORES = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()


def refuse(message):
    sys.exit(f'error: {message}')


def say(message):
    print(message, flush=True)


def title(run) -> str:
    return f'{run.cell} seed {run.seed}'

# ----------------------------------------------------------------------------------------------------------------------
# where a run stands, by its files alone

def is_trained(run, max_iters: int) -> bool:
    """metrics.jsonl ends with the evaluation at max_iters, and last.pt, unless it was removed since, is of that step.

    train.py logs an evaluation and then saves; a run killed in between has an older last.pt. It is of that step if it is
    the newer file, or if a run was resumed from it there.
    """
    records = read_metrics(run.folder)
    if [r['step'] for r in records if 'val_loss' in r][-1:] != [max_iters]:
        return False
    last, log = run.folder / 'last.pt', run.folder / 'metrics.jsonl'
    return (not last.exists() or last.stat().st_mtime_ns >= log.stat().st_mtime_ns
            or any('config' in r and r['step'] == max_iters for r in records))


def scored_tasks(run, max_iters: int) -> list[str]:
    """The tasks in evaluate.json, if that is of the finished last.pt."""
    file, last = run.folder / 'evaluate.json', run.folder / 'last.pt'
    try:
        document = json.loads(file.read_text(encoding='utf-8'))
        fresh = document['step'] == max_iters and not (last.exists() and last.stat().st_mtime_ns > file.stat().st_mtime_ns)
        return list(document['results']) if fresh else []
    except (OSError, ValueError, LookupError, TypeError):
        return []


def next_process(study, run, nproc: int):
    """('train' or 'evaluate', the command) that a run needs next, or None if it is finished."""
    max_iters = (study.base | run.settings)['max_iters']
    flags = lambda settings: [f'--{key}={value}' for key, value in settings.items()]
    if not is_trained(run, max_iters):
        settings = dict(init_from='auto') | run.settings | dict(out_dir=run.folder)
        if any(run.folder.glob('*.pt')):
            settings['init_from'] = 'auto'
        elif settings['init_from'] != 'auto':  # a warm start that was killed before its first checkpoint has left metrics.jsonl
            settings['overwrite'] = True
        launch = ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={nproc}'] if nproc > 1 else []
        return 'train', [sys.executable, *launch, str(TRAIN), study.config, *flags(settings)]
    scored, wanted = scored_tasks(run, max_iters), study.tasks.split(',') if study.tasks else []
    if not set(wanted) <= set(scored):
        tasks = ','.join(dict.fromkeys(scored + wanted))  # evaluate.json is written anew: keep the tasks of another study
        settings = dict(ckpt=run.folder / 'last.pt', tasks=tasks, json=run.folder / 'evaluate.json')
        settings |= {key: (study.base | run.settings)[key] for key in ('dataset', 'device', 'dtype')}
        return 'evaluate', [sys.executable, str(EVALUATE), *flags(settings)]


def differences(study, run) -> list[str]:
    """How the run in the folder is another than the study's; train.py compares too, but a finished run does not get there."""
    heads = [r['config'] for r in read_metrics(run.folder) if 'config' in r]
    if not heads:
        return []
    was, now = train.defaults | heads[-1], study.base | run.settings
    lines = [f'{key}: {was[key]!r} in the folder, {now[key]!r} in the study' for key in now
             if (key not in train.MAY_CHANGE or key in ('dataset', 'eval_iters')) and was.get(key) != now[key]]
    source = lambda path: None if path in ('auto', 'scratch', 'resume') else Path(path).parts[-4:]  # SCALE/CELL/seed_SEED/last.pt
    began, begins = heads[0]['init_from'], run.settings.get('init_from', 'auto')
    return lines + [f'init_from: {began!r} in the folder, {begins!r} in the study'] * (source(began) != source(begins))


def remaining_seconds(study, runs, jobs: int):
    """Of training, evaluations not counted; None before the first log line. A run is as fast as the runs of its cell have been,
    or else as all have been on average."""
    speeds, left = {}, []
    for run in runs:
        now, records = study.base | run.settings, read_metrics(run.folder)
        tokens = now['gradient_accumulation_steps'] * now['batch_size'] * now['block_size']
        if rates := [r['tok_s'] for r in records if 'tok_s' in r]:
            speeds.setdefault(run.cell, []).append(tokens / statistics.median(rates))
        left.append((run.cell, max(0, now['max_iters'] - max((r['step'] for r in records), default=0))))
    if not speeds:
        return None
    mean = {cell: statistics.fmean(values) for cell, values in speeds.items()}
    overall = statistics.fmean(mean.values())
    return sum(steps * mean.get(cell, overall) for cell, steps in left) / jobs


def last_line(log: Path) -> str:
    """Why the last process of a log failed: its 'error:' line, or the last one."""
    text = log.read_text(encoding='utf-8', errors='replace').rpartition('\n$ ')[2]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith('error:')), lines[-1])

# ----------------------------------------------------------------------------------------------------------------------
# what is refused before the first run

def choose(study, cfg) -> list:
    """The runs of --seeds and --cells, and of the cells that those start from."""
    known = dict.fromkeys(str(run.seed) for run in study.runs)
    for key, given, those in ('seeds', cfg.seeds, known), ('cells', cfg.cells, study.cells):
        if unknown := [x for x in given.split(',') if given and x not in those]:
            refuse(f'--{key}={given}: {study.path} has no {unknown[0]!r} at scale {cfg.scale}, it has {",".join(those)}')
    wanted = set(cfg.cells.split(',') if cfg.cells else study.cells)
    while more := {study.cells[cell].get('init_from', 'cell:')[5:] for cell in wanted} - wanted - {''}:
        wanted |= more
    return [run for run in study.runs if run.cell in wanted and (not cfg.seeds or str(run.seed) in cfg.seeds.split(','))]


def check(study, runs, cfg, nproc: int, units: int, unit: str):
    """Refuse what cannot work. `units` CPU cores or GPUs are shared by the processes."""
    if cfg.jobs * nproc > units:
        refuse(f'--jobs={cfg.jobs} with a run of {nproc} process{"es" * (nproc > 1)}: expected at most {units} processes '
               f'in all, one for each of the {units} {unit} here: lower --jobs or --nproc_per_node')
    missing = {}
    for run in runs:
        now = study.base | run.settings | dict(init_from='auto')
        try:
            train.check(SimpleNamespace(**now))
        except SystemExit as e:
            refuse(f'{study.path}: cell {run.cell!r}: {str(e).removeprefix("error: ")}')
        if now['gradient_accumulation_steps'] % nproc:
            refuse(f'{study.path}: cell {run.cell!r}: gradient_accumulation_steps = {now["gradient_accumulation_steps"]}, expected '
                   f'a multiple of {nproc}, the processes of a run (--nproc_per_node)')
        if lines := differences(study, run):
            refuse(f'{run.folder} holds another run:\n  ' + '\n  '.join(lines) +
                   '\nGive the study those settings again, move that folder away, or keep both with another --out')
        missing[now['dataset']] = None
    for name in missing:
        try:
            prepare.open_corpus(name)
        except prepare.DataError as e:
            if name in study.corpora and not (prepare.DATA_DIR / name).exists():
                e = f'there is no corpus {prepare.DATA_DIR / name}; prepare it: python prepare.py {study.corpora[name]}'
            missing[name] = e
    for name in {'lambada', 'hellaswag'} & set(study.tasks.split(',')):
        try:
            prepare.open_rows(name)
        except prepare.DataError as e:
            missing[name] = e
    if problems := [str(e) for e in missing.values() if e]:
        refuse('\n'.join(problems))


def lock(study):
    """A file that is locked as long as this process or one that it started lives, so a run has one process at a time."""
    study.folder.mkdir(parents=True, exist_ok=True)
    file = open(study.folder / 'sweep.lock', 'a+')
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        refuse(f'{study.folder} is in use by the sweep with process id {file.read().strip()}, or by a run that it has left behind '
               '(ps -ef shows them): wait, or stop it and give the same command')
    file.truncate(0)
    file.write(f'{os.getpid()}\n')
    file.flush()
    return file

# ----------------------------------------------------------------------------------------------------------------------

def environment(slot: int, jobs: int, nproc: int, gpus: int) -> dict:
    """Of the processes in a slot, 0 to jobs - 1: its share of the cores, its own GPUs."""
    env = dict(os.environ)
    env.setdefault('OMP_NUM_THREADS', str(max(1, CORES // (jobs * nproc))))
    if gpus and jobs > 1:
        visible = os.environ.get('CUDA_VISIBLE_DEVICES') or ','.join(map(str, range(gpus)))
        env['CUDA_VISIBLE_DEVICES'] = ','.join(visible.split(',')[slot * nproc:(slot + 1) * nproc])
    return env


def run_all(study, runs, cfg, nproc: int, gpus: int, lock_file):
    """Run what is not finished. Returns [(failed run, why)] and the signal that ended the sweep, or None."""
    pending = [run for run in runs if next_process(study, run, nproc)]
    running, failed, signals, shown = {}, {}, [], time.time()  # slot -> (run, kind, process); folder -> (run, why)
    say(f'{len(runs) - len(pending)} of {len(runs)} runs are finished')

    def progress():
        seconds = remaining_seconds(study, [run for run in runs if run.folder not in failed], cfg.jobs)
        eta = f', about {timedelta(seconds=round(seconds))} of training left' if seconds else ''
        done = len(runs) - len(pending) - len(running) - len(failed)
        return f'{done} of {len(runs)} finished, {len(running)} running, {len(failed)} failed{eta}'

    def start(slot, run):
        kind, command = next_process(study, run, nproc)
        run.folder.mkdir(parents=True, exist_ok=True)
        with open(run.folder / 'log.txt', 'a', encoding='utf-8') as log:
            log.write(f'\n$ {shlex.join(command)}\n')
            log.flush()
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                       env=environment(slot, cfg.jobs, nproc, gpus), pass_fds=[lock_file.fileno()],
                                       start_new_session=True)  # so that Ctrl-C is for this process alone
        running[slot] = run, kind, process
        say(f'{title(run)}: {kind}, process {process.pid}')

    def end(slot):
        run, kind, process = running.pop(slot)
        status, again = process.wait(), next_process(study, run, nproc)
        if status == 0 and again is None:
            say(f'{title(run)}: finished; {progress()}')
        elif status == 0 and again[0] != kind:
            pending.insert(0, run)
        else:
            why = last_line(run.folder / 'log.txt') if status else f'{kind} ended without its results'
            why = (f'killed by {signal.Signals(-status).name}, after: ' if status < 0 else '') + why
            failed[run.folder] = run, f'{why}\n  log: {run.folder / "log.txt"}'
            say(f'{title(run)}: FAILED: {why}; {progress()}')

    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    numbers = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]  # nohup ignores SIGHUP
    old = {number: signal.signal(number, lambda number, frame: signals.append(number)) for number in numbers}
    try:
        while (running or pending) and not signals:
            for slot in [slot for slot, (_, _, process) in running.items() if process.poll() is not None]:
                end(slot)
            for run in list(pending):
                source = Path(run.settings['init_from']).parent if 'init_from' in run.settings else None
                if source in failed:
                    pending.remove(run)
                    failed[run.folder] = run, f'not run: {title(failed[source][0])}, which it starts from, failed'
                elif len(running) < cfg.jobs and source not in [r.folder for r in pending + [r for r, _, _ in running.values()]]:
                    pending.remove(run)
                    start(min(set(range(cfg.jobs)) - set(running)), run)
            if time.time() - shown > REFRESH:
                shown = time.time()
                say(progress())
            time.sleep(POLL if running else 0)
    finally:
        for _, _, process in running.values():  # none, unless a signal or an error ended the loop
            process.terminate()
        if running:
            say(f'stopping: {", ".join(title(run) for run, _, _ in running.values())}; train.py saves before it ends')
        for _, _, process in running.values():
            process.wait()
        for number, handler in old.items():
            signal.signal(number, handler)
    return list(failed.values()), signals[0] if signals else None


def main(argv):
    """Returns the exit status: 0, 1 if a run failed, or 128 + the signal that ended the sweep."""
    paths = [arg for arg in argv if not arg.startswith('-')]
    cfg = SimpleNamespace(**configure(defaults, [arg for arg in argv if arg.startswith('-')]))
    if len(paths) != 1:
        refuse(f'{len(paths)} studies given, expected one: python experiments/sweep.py experiments/studies/cpu_study.py')
    if cfg.jobs < 1 or cfg.nproc_per_node < 0:
        refuse(f'--jobs={cfg.jobs} --nproc_per_node={cfg.nproc_per_node}: expected at least 1 and at least 0')
    study = load(paths[0], cfg.scale, cfg.out)
    runs, nproc = choose(study, cfg), cfg.nproc_per_node or study.nproc
    gpus = torch.cuda.device_count() if study.base['device'] != 'cpu' and torch.cuda.is_available() else 0
    command = shlex.join(['python', 'experiments/sweep.py', *argv])
    if cfg.dry_run:
        say(f'{study.title}\n')
        for run in runs:
            process = next_process(study, run, nproc)
            say(f'{title(run)}: ' + (f'{process[0]}: {shlex.join(process[1])}' if process else 'finished'))
        return 0
    check(study, runs, cfg, nproc, gpus or CORES, 'GPUs' if gpus else 'CPU cores')
    lock_file = lock(study)
    failed, stopped = run_all(study, runs, cfg, nproc, gpus, lock_file)
    if failed:
        say(f'\n{len(failed)} of {len(runs)} runs failed:')
        for run, why in failed:
            say(f'{title(run)}: {why}')
        say(f'To try these again, when the cause is mended: {command}')
    if stopped:
        say(f'stopped by {signal.Signals(stopped).name}; to go on: {command}')
        return 128 + stopped
    if not failed:
        say(f'all {len(runs)} runs are finished, in {study.folder}\n'
            f'next: python experiments/report.py {paths[0]} --scale={cfg.scale}'
            + (f' --out={cfg.out}' if cfg.out != out else ''))
    return 1 if failed else 0


if __name__ == '__main__':
    try:
        sys.exit(main(sys.argv[1:]))
    except (ConfigError, prepare.DataError, OSError) as e:
        refuse(e)
    except KeyboardInterrupt:  # before the first run
        sys.exit(130)
