"""
Evaluate a checkpoint of train.py: perplexity, LAMBADA, HellaSwag, associative recall.

    python experiments/evaluate.py --ckpt=out/tiny/best.pt                  # perplexity on the test split
    python experiments/evaluate.py --ckpt=out/wikitext103_60m/best.pt --tasks=ppl,lambada,hellaswag --json=60m.json
    python experiments/evaluate.py --ckpt=out/mqar/last.pt --tasks=mqar --limit=0

Prints a table and, as last line, the same as one JSON document. --json=PATH keeps it with the result of every example,
for experiments/compare.py. Tokenizer and model, and the corpus unless --dataset names another, are the checkpoint's.
"""
import math
import os
import re
import sys
from contextlib import nullcontext
from json import dumps, loads
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import prepare
import train
from configurator import ConfigError, configure
from model import GPT, GPTConfig
from train import refuse

ckpt = ''                  # the checkpoint
tasks = 'ppl'              # ppl, lambada, hellaswag, mqar; several separated by commas
dataset = ''               # corpus for ppl or mqar, of the same tokenizer; '': the one it was trained on
split = 'test'             # of that corpus: train | val | test
stride = 0                 # ppl: tokens from window to window, 1 to block_size; 0: block_size, no overlap
limit = 2000               # examples of lambada and hellaswag, rows of each kind of mqar, drawn by seed; 0: all
seed = 0                   # of that draw, >= 0
batch_size = 0             # sequences at a time; 0: as in training
device = 'auto'            # auto | cpu | cuda | cuda:N
dtype = 'auto'             # auto | float32 | bfloat16 | float16; auto as in training: float32 on a CPU, else bfloat16
json = ''                  # file to write, with the result of every example
defaults = {k: v for k, v in globals().items() if k[0] != '_' and type(v) in (bool, int, float, str)}

# ----------------------------------------------------------------------------------------------------------------------
# shared with sample.py

def load(path: str, device='cpu'):
    """(model in eval mode, checkpoint) of a file that train.py wrote."""
    if not path:
        refuse('--ckpt is missing, expected a checkpoint of train.py: --ckpt=out/tiny/best.pt')
    state, problem = train.read_checkpoint(path)
    if problem:
        found = ', '.join(map(str, sorted(Path(path).parent.glob('*.pt'))[:5]))
        refuse(f'--ckpt={path} is no checkpoint of train.py ({problem})' + (f'; in that folder: {found}' if found else ''))
    try:
        model = GPT(GPTConfig(**state['model_args']))
        model.load_state_dict(state['model'])
    except (TypeError, ValueError, RuntimeError) as e:
        refuse(f'--ckpt={path} does not fit this model.py: {e}')
    return model.to(device).eval(), state


def tokenizer_of(state, path: str):
    """The tiktoken.Encoding that the checkpoint carries."""
    if state['tokenizer']['name'] == 'none':
        refuse(f'--ckpt={path} was trained on {state["data"]["name"]}, rows of ids that stand for no text: only '
               'evaluate.py --tasks=mqar fits it')
    return prepare.tokenizer_from_state(state['tokenizer'])


def set_up(device: str, dtype: str):
    """(device, autocast context) by the rules of train.py, which also refuses what is not there."""
    train.check(SimpleNamespace(**train.defaults | dict(device=device, dtype=dtype)))
    kind = 'cuda' if device[:4] == 'cuda' or device == 'auto' and torch.cuda.is_available() else 'cpu'
    if kind == 'cuda':
        torch.set_float32_matmul_precision('high')
    if dtype == 'auto':
        dtype = 'float32' if kind == 'cpu' else 'bfloat16' if torch.cuda.is_bf16_supported(False) else 'float16'
    autocast = nullcontext() if dtype == 'float32' else torch.amp.autocast(kind, getattr(torch, dtype))
    return kind if device == 'auto' else device, autocast

# ----------------------------------------------------------------------------------------------------------------------
# scores of tokens

def token_nll(logits, y):
    """Negative log-likelihoods (B, T) in nats of the labels y (B, T); 0 where y is -1."""
    nll = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), ignore_index=-1, reduction='none')
    return nll.view(y.shape).double()


@torch.no_grad()
def log_likelihoods(model, pairs, batch_size, device='cpu', autocast=nullcontext(), name='task'):
    """For each (context ids, target ids): log p(target | context) in nats, and whether each target token is the argmax.

    Two arrays, float64 and bool. The context loses its left end where block_size requires. Sequences of like length
    share a batch, padded on the right, where a causal model does not look.
    """
    size = model.config.block_size
    for context, target in pairs:
        if not context or not 1 <= len(target) <= size:
            refuse(f'{name}: an example has {len(context)} tokens of context and {len(target)} to score, expected at least 1 '
                   f'and 1 to {size}, the block_size of the model')
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0] + pairs[i][1]))
    scores, greedy = np.zeros(len(pairs)), np.zeros(len(pairs), dtype=bool)
    for lo in prepare.progress(range(0, len(order), batch_size), desc=name, unit=' batches'):
        batch = order[lo:lo + batch_size]
        sequences = [torch.tensor((pairs[i][0] + pairs[i][1])[-size - 1:]) for i in batch]
        labels = [F.pad(ids[-len(pairs[i][1]):], (len(ids) - 1 - len(pairs[i][1]), 0), value=-1) for i, ids in zip(batch, sequences)]
        x = nn.utils.rnn.pad_sequence([ids[:-1] for ids in sequences], batch_first=True).to(device)
        y = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-1).to(device)
        with autocast:
            logits = model(x, y)[0]                                       # (B, T, V)
        scores[batch] = -token_nll(logits, y).sum(1).cpu().numpy()
        greedy[batch] = ((logits.argmax(-1) == y) | (y == -1)).all(1).cpu().numpy()
    return scores, greedy


def mean_se(values, weights=1):
    """Weighted mean of one value an example and its standard error (None for one example), as of a ratio estimator:
    with equal weights the sample standard deviation over sqrt(n)."""
    values, n = np.asarray(values, dtype=np.float64), len(values)
    weights = np.broadcast_to(weights, n)
    mean = (values * weights).sum() / weights.sum()
    se = np.sqrt(n / max(n - 1, 1) * ((weights * (values - mean)) ** 2).sum()) / weights.sum()
    return float(mean), float(se) if n > 1 else None

# ----------------------------------------------------------------------------------------------------------------------
# The tasks. Each opens and checks its data, so that a fault shows before any work is done, and returns the function that
# does the work: its rows of the table (measure, value, standard error, n), and for compare.py the value of each example.

def open_corpus(env):
    name, was = env.cfg.dataset or env.state['data']['name'], env.state['tokenizer']['name']
    corpus = prepare.open_corpus(name)
    if corpus.tokenizer_state != env.state['tokenizer'] or corpus.vocab_size != env.model.config.vocab_size:
        refuse(f'{corpus.path} has another tokenizer ({corpus.meta["tokenizer"]}, {corpus.vocab_size} ids) than the checkpoint '
               f'({was}, {env.model.config.vocab_size} ids), whose corpus was {env.state["data"]["name"]}')
    if name == env.state['data']['name'] and corpus.sha256 != env.state['data']['sha256']:
        print(f'note: {corpus.path} has changed since the checkpoint was trained on it', file=sys.stderr)
    return corpus


def draw(env, n: int, where):
    """Indices of the examples to score: all of n, or `limit` of them drawn by `seed`, sorted."""
    limit = env.cfg.limit
    if limit > n:
        refuse(f'--limit={limit}, but {where} has {n} examples; --limit=0 takes all')
    return np.sort(np.random.default_rng(env.cfg.seed).choice(n, limit, replace=False)) if limit else np.arange(n)


def open_examples(env, name: str):
    rows = prepare.open_rows(name)
    chosen = draw(env, len(rows), prepare.DATA_DIR / name)
    meta = loads((prepare.DATA_DIR / name / 'meta.json').read_text(encoding='utf-8'))
    return [rows[i] for i in chosen], dict(data=meta['sha256'], indices=chosen.tolist())


def accuracies(right, about):
    return [(name, *mean_se(r), len(r)) for name, r in right.items()], dict(about, values=right)


def overlapping(tokens, size, stride):
    """A window every `stride` tokens, as (inputs, labels), each (windows, size). A token is a label once, in the first
    window that holds it, and so sees at least size - stride tokens before it, but for the first window's."""
    starts = np.append(np.arange(0, len(tokens) - 1 - size, stride), len(tokens) - 1 - size)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, size + 1)[starts]
    labels, new = windows[:, 1:].astype(np.int64), np.diff(starts, prepend=-size)
    labels[np.arange(size) < size - new[:, None]] = -1
    return windows[:, :-1], labels


def text_size(tokenizer, ids):
    """Bytes and whitespace-separated words of the decoded ids; <|endoftext|> is no byte, and ends a word."""
    parts = tokenizer.decode_bytes(ids.tolist()).split(prepare.END.encode())
    return sum(map(len, parts)), sum(len(part.decode('utf-8', 'replace').split()) for part in parts)


def ppl(env):
    """train.evaluate on the whole split; bytes and words are those of the scored tokens, that is, of all but the first.

    The standard error takes windows as independent, which neighbours in a document are not: read it as a lower bound.
    """
    corpus, size, stride = open_corpus(env), env.model.config.block_size, env.cfg.stride
    if 'row_length' in corpus.meta:
        refuse(f'{corpus.path} is no running text: --tasks=mqar, or another --dataset')
    tokenizer, tokens = tokenizer_of(env.state, env.cfg.ckpt), corpus.tokens(env.cfg.split)
    corpus.require(env.cfg.split, size)
    if not 0 <= stride <= size:
        refuse(f'--stride={stride}: expected 1 to {size}, the block_size of the model, or 0')

    def run():
        losses, weights = [], []  # of each window

        def note(model, inputs, output):
            n = (inputs[1] != -1).sum(1)
            losses.extend((token_nll(output[0], inputs[1]).sum(1) / n).tolist())
            weights.extend(n.tolist())
        hook = env.model.register_forward_hook(note)
        data = overlapping(tokens, size, stride) if 0 < stride < size else tokens
        loss, n = train.evaluate(env.model, data, size, *env.how)
        hook.remove()
        n_bytes, n_words = text_size(tokenizer, np.asarray(tokens[1:]))
        rows = [('nats_per_token', loss, mean_se(losses, weights)[1], n),
                ('perplexity_per_token', train.perplexity(loss), None, n),
                ('bits_per_byte', loss * n / n_bytes / math.log(2), None, n_bytes),
                ('perplexity_per_word', train.perplexity(loss * n / n_words), None, n_words)]
        return rows, dict(data=corpus.sha256[env.cfg.split], block_size=size, stride=stride, weights=weights,
                          values={'nats_per_token': losses})
    return run


def encode_pair(tokenizer, context: str, continuation: str):
    """Ids of both, encoded together and cut at the context's length; spaces at its end go to the continuation."""
    ids, n = tokenizer.encode_ordinary(context + continuation), len(tokenizer.encode_ordinary(context.rstrip()))
    return ids[:n], ids[n:]


def lambada(env):
    """Is the last token (ids[:-1] -> ids[-1]), or each token of the last word, the likeliest one?"""
    tokenizer, (examples, about) = tokenizer_of(env.state, env.cfg.ckpt), open_examples(env, 'lambada')
    whole = [tokenizer.encode_ordinary(row['text']) for row in examples]
    cut = [row['text'].rpartition(' ') for row in examples]
    pairs = dict(last_token=[(ids[:-1], ids[-1:]) for ids in whole],
                 last_word=[encode_pair(tokenizer, context, ' ' + word) for context, _, word in cut])

    def run():
        return accuracies({name: log_likelihoods(env.model, p, *env.how, f'lambada {name}')[1].astype(int).tolist()
                           for name, p in pairs.items()}, about)
    return run


def clean(text: str) -> str:
    text = text.strip().replace(' [title]', '. ')  # HellaSwag has marks of WikiHow in it
    return re.sub(r'\[.*?\]', '', text).replace('  ', ' ')


def hellaswag(env):
    """Is the right one of four endings the likeliest: in all, per token, per character?"""
    tokenizer, (examples, about) = tokenizer_of(env.state, env.cfg.ckpt), open_examples(env, 'hellaswag')
    queries = [clean(row['activity_label'] + ': ' + row['ctx_a'] + ' ' + row['ctx_b'].capitalize()) for row in examples]
    endings = [[clean(ending) for ending in row['endings']] for row in examples]
    pairs = [encode_pair(tokenizer, q, ' ' + ending) for q, four in zip(queries, endings) for ending in four]

    def run():
        scores = log_likelihoods(env.model, pairs, *env.how, 'hellaswag')[0].reshape(-1, 4)
        n_tokens = np.array([len(target) for _, target in pairs]).reshape(-1, 4)
        n_chars = np.array([[len(ending) or 1 for ending in four] for four in endings])
        labels = np.array([row['label'] for row in examples])
        by = dict(sum=scores, per_token=scores / n_tokens, per_character=scores / n_chars)
        return accuracies({name: (s.argmax(1) == labels).astype(int).tolist() for name, s in by.items()}, about)
    return run


def mqar(env):
    """Share of a row's questions whose answer is the likeliest of all tokens, for each (kv, length)."""
    corpus, size, (batch_size, device, autocast) = open_corpus(env), env.model.config.block_size, env.how
    x, y = corpus.rows(env.cfg.split)
    if x.shape[1] > size:
        refuse(f'{corpus.path} has rows of {x.shape[1]} tokens, but the block_size of the model is {size}')
    kinds = {f'kv{s["kv"]}_len{s["len"]}': s['start'] + draw(env, s['stop'] - s['start'], corpus.path)
             for s in corpus.meta['segments'][env.cfg.split]}

    @torch.no_grad()
    def run():
        right = {}
        for name, chosen in kinds.items():
            right[name] = []
            for lo in prepare.progress(range(0, len(chosen), batch_size), desc=f'mqar {name}', unit=' batches'):
                ids, labels = (train.to_tensor(z[chosen[lo:lo + batch_size]], device) for z in (x, y))
                with autocast:
                    answers = env.model(ids, labels)[0].argmax(-1)        # (B, T)
                right[name] += ((answers == labels).sum(1) / (labels != -1).sum(1)).tolist()
        return accuracies(right, dict(data=corpus.sha256[env.cfg.split], indices={k: c.tolist() for k, c in kinds.items()}))
    return run


TASKS = dict(ppl=ppl, lambada=lambada, hellaswag=hellaswag, mqar=mqar)


def main(argv):
    cfg = SimpleNamespace(**configure(defaults, argv))
    names = cfg.tasks.split(',')
    if unknown := [name for name in names if name not in TASKS]:
        refuse(f'--tasks={cfg.tasks}: {unknown[0]!r} is unknown, expected some of {",".join(TASKS)}')
    for key in 'limit', 'seed', 'batch_size':
        if getattr(cfg, key) < 0:
            refuse(f'--{key}={getattr(cfg, key)}: expected 0 or more')
    if cfg.json and (os.path.isdir(cfg.json) or not os.access(Path(cfg.json).parent, os.W_OK)):
        refuse(f'--json={cfg.json}: expected a file in a folder that is there and writable')
    device, autocast = set_up(cfg.device, cfg.dtype)
    model, state = load(cfg.ckpt, device)
    env = SimpleNamespace(cfg=cfg, model=model, state=state, how=(cfg.batch_size or state['config']['batch_size'], device, autocast))
    plans = {name: TASKS[name](env) for name in names}

    print(f'{cfg.ckpt}: {model.config.attention} attention, coupling {model.config.coupling}, '
          f'{model.get_num_params():,} parameters, step {state["iter_num"]}')
    print(f'{"task":10} {"measure":20} {"value ± standard error":>24} {"n":>12}')
    results, examples = {}, {}
    for name, run in plans.items():
        rows, examples[name] = run()
        results[name] = {measure: dict(value=value, se=se, n=n) for measure, value, se, n in rows}
        for measure, value, se, n in rows:
            print(f'{name:10} {measure:20} {f"{value:.4f}" + (f" ± {se:.4f}" if se is not None else ""):>24} {n:>12,}', flush=True)
    document = dict(ckpt=cfg.ckpt, step=state['iter_num'], config=vars(cfg), model=state['model_args'],
                    trained_on=state['data'], run_seed=state['config']['seed'], results=results)
    if cfg.json:
        Path(cfg.json).write_text(dumps(document | dict(examples=examples)) + '\n', encoding='utf-8')
    print(dumps(document))


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except (ConfigError, prepare.DataError, OSError, MemoryError, torch.OutOfMemoryError) as e:
        refuse(str(e) or 'out of memory, a smaller --batch_size helps')
    except KeyboardInterrupt:
        sys.exit(130)
