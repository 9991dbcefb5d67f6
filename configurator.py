"""
Settings from config files and command-line flags, nanoGPT style but checked:

    python train.py config/tiny.py --max_iters=1e3 --eval_only

A script lists its settings with their defaults and calls `configure(settings, sys.argv[1:])`. Config files are Python
and are executed with your rights; a later argument overrides an earlier one. A key must be known, and the type of its
default is the type of its value, so that a typo stops the script before anything has run.
"""
import difflib
import math
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent
EXPECTED = {bool: 'True or False', int: 'an integer', float: 'a finite number', str: 'a string'}


class ConfigError(Exception):
    """A mistake in a config file or flag; the message is complete and meant for the user."""


def configure(settings: dict, argv: list[str], search=('.', ROOT)) -> dict:
    """Return `settings` (name -> default: bool, int, float or str) overridden by `argv`, left to right.

    An argument is `--key=value`, `--key` (True, for a bool) or the path of a config file, looked up in each folder of
    `search` in turn. `--help` prints the settings with the comments of the calling file and exits.
    Raises ConfigError.
    """
    if '--help' in argv or '-h' in argv:
        print_help(settings, sys._getframe(1).f_code.co_filename)
        sys.exit(0)
    out = dict(settings)
    for arg in argv:
        if arg.startswith('--'):
            key, has_value, text = arg[2:].partition('=')
            check_key(key, settings, 'command line')
            kind = type(settings[key])
            if not has_value and kind is not bool:
                raise ConfigError(f'command line: {arg} needs a value, {EXPECTED[kind]}: --{key}=...')
            out[key] = coerce(parse(text, kind) if has_value else True, key, settings, 'command line')
        else:
            path = find_config(arg, search)
            for key, value in run_config(path).items():
                check_key(key, settings, str(path))
                out[key] = coerce(value, key, settings, str(path))
    return out


def check_key(key: str, settings: dict, where: str):
    if key not in settings:
        near = difflib.get_close_matches(key, settings, n=1, cutoff=0)
        raise ConfigError(f'{where}: unknown key {show(key)}, did you mean {near[0]!r}? (--help lists all keys)')


def parse(text: str, kind: type):
    """The value that `text` spells, or `text` itself when it spells none of this kind; `coerce` then complains."""
    if kind is bool:
        return {'true': True, 'false': False}.get(text.lower(), text)
    for number in {int: (int, float), float: (float,), str: ()}[kind]:
        try:
            return number(text)
        except ValueError:
            pass
    return text


def coerce(value, key: str, settings: dict, where: str):
    """`value` in the type of the default. An int widens to float, an integral float (1e3) narrows to int."""
    kind, given = type(settings[key]), type(value)
    if kind is given and kind in (bool, str):
        return value
    if kind is str and given in (bool, int, float):
        return str(value)
    if kind in (int, float) and given in (int, float):
        try:
            number = kind(value)
            if math.isfinite(number) if kind is float else number == value and abs(number) < 2**63:
                return number
        except (OverflowError, ValueError):  # int(inf), int(nan), float(10**400)
            pass
    raise ConfigError(f'{where}: {key} = {show(value)}, expected {EXPECTED[kind]} such as {settings[key]!r}')


def show(value) -> str:
    try:
        text = repr(value)
    except Exception:  # an int of 5000 digits refuses to be printed
        text = f'<{type(value).__name__}>'
    return text if len(text) <= 100 else text[:100] + '...'


def find_config(arg: str, search) -> Path:
    for folder in search:
        path = Path(folder) / arg  # an absolute path stays as it is
        if os.path.isfile(path):  # unlike path.is_file(), never raises
            return path
    known = [p.relative_to(ROOT).as_posix() for p in sorted(ROOT.glob('config/*.py'))]
    near = difflib.get_close_matches(arg, known, n=1, cutoff=0.5)
    raise ConfigError(f'{show(arg)} is neither a flag (--key=value) nor a config file here or in {ROOT}'
                      + (f', did you mean {near[0]}?' if near else ''))


def run_config(path: Path) -> dict:
    """Execute a config file and return what it sets; modules and names with a leading underscore are its own."""
    names = {'__name__': '__config__', '__file__': str(path)}
    try:
        exec(compile(path.read_bytes(), str(path), 'exec'), names)
    except (Exception, SystemExit) as e:
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path)]
        line = e.lineno if isinstance(e, SyntaxError) and e.filename == str(path) else lines[-1] if lines else None
        raise ConfigError(f'{path}' + (f', line {line}' if line else '') + f': {type(e).__name__}: {e}') from None
    return {k: v for k, v in names.items() if not k.startswith('_') and not isinstance(v, ModuleType)}


def print_help(settings: dict, file: str):
    """Print each setting, its default and the comment that stands behind it in the source of `file`."""
    source = Path(file).read_text(encoding='utf-8') if Path(file).is_file() else ''
    print(f'usage: python {Path(file).name} [config.py ...] [--key=value ...]\n')
    for key, value in settings.items():
        comment = re.search(rf'^\s*{key}\s*=[^=].*?#\s*(.*)$', source, re.MULTILINE)
        print(f'  --{key}={value!r}'.ljust(40), comment[1] if comment else '')
