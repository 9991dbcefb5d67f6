"""
Train a GPT of model.py on a corpus of prepare.py: on a CPU, on one GPU, or on many with torchrun.

    python train.py config/tiny.py
    python train.py config/tiny.py --attention=diff --coupling=alternating --out_dir=out/diff_alt
    torchrun --standalone --nproc_per_node=8 train.py config/wikitext103_60m.py

A run lives in its folder `out_dir`: last.pt and best.pt (checkpoints) and metrics.jsonl (a line of JSON per log line).
A run that was stopped or killed continues when the same command is given again, and gives the same numbers as if it
had never stopped: the batch and the dropout of a step depend on (seed, step) only, everything else is in last.pt.
"""
import glob
import importlib.util
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import asdict, fields
from itertools import islice
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import prepare
from configurator import ConfigError, configure
from model import GPT, GPTConfig

# ----------------------------------------------------------------------------------------------------------------------
# settings: override them by config files and --key=value, in the order given; --help prints them.
# The values are ours: the papers do not publish their optimizer, learning rate or batch.

# the run
out_dir = 'out'                  # its folder
init_from = 'auto'               # auto: resume the run in out_dir, or start one | scratch | resume | a .pt: weights to start from
overwrite = False                # True: a new run may erase the one in out_dir
max_iters = 20000                # updates of the weights, >= 0
eval_interval = 1000             # updates between evaluations; each saves a checkpoint
eval_iters = 0                   # batches of the validation split to evaluate on; 0: all of it
eval_only = False                # True: evaluate, write nothing, stop
log_interval = 10                # updates between log lines
keep = 0                         # numbered checkpoints to keep beside last.pt and best.pt
prompt = ''                      # print a sample that continues this text at the end
wandb_log = False                # True: log to Weights & Biases too
wandb_project = 'qk-coupling'
wandb_run_name = ''              # '': a name made by wandb
# data
dataset = 'pydocs'               # a folder in data/, made by prepare.py
block_size = 512                 # tokens in a window
batch_size = 16                  # windows in a micro-step on one device
gradient_accumulation_steps = 8  # micro-steps in an update, over all devices: 8 x 16 x 512 = 65,536 tokens an update
# model: the 60M size of the paper; model.py explains the fields
n_layer = 8
n_head = 8
n_kv_head = 0                    # 0: n_head; fewer: grouped-query attention
n_embd = 512
d_ff = 0                         # 0: 4 * n_embd
dropout = 0.0                    # [0, 1)
pos = 'learned'                  # learned | rope
n_pos = 2048                     # rows of the learned position table, >= block_size
attention = 'standard'           # standard | diff | mta
qk_norm = False                  # RMSNorm of q and k
coupling = 'none'                # none | one_way | alternating | simultaneous | cross_mlp | ... see COUPLINGS in model.py
coupling_rounds = 1              # 1 to 16 for alternating, simultaneous and one_way, to 7 for [v1]'s, 1 for the others
flash = True                     # False: attention by explicit softmax maps
seed = 1337                      # of the weights, the batches and the dropout, >= 0
# optimizer: AdamW
learning_rate = 6e-4             # the highest of the schedule
weight_decay = 0.1               # of matrices and embeddings
beta1 = 0.9                      # [0, 1)
beta2 = 0.95                     # [0, 1)
grad_clip = 1.0                  # largest norm of the gradient; 0: no clipping
decay_lr = True                  # after the warmup, False: constant | True: a cosine from learning_rate to min_lr
warmup_iters = 500               # updates of linear warmup
lr_decay_iters = 20000           # update at which min_lr is reached; as a rule max_iters
min_lr = 6e-5                    # as a rule learning_rate / 10
# system
device = 'auto'                  # auto | cpu | cuda | cuda:N
dtype = 'auto'                   # auto | float32 | bfloat16 | float16 of matrix products; auto: float32 on a CPU, else bfloat16
compile = 'auto'                 # auto: on CUDA only | True | False
loss_chunk = 0                   # compute the loss for so many tokens at a time: less memory; 0: all at once
backend = 'auto'                 # of torch.distributed; auto: nccl on GPUs, gloo on CPUs
defaults = {k: v for k, v in globals().items() if k[0] != '_' and type(v) in (bool, int, float, str)}

# Settings that may differ when a run is resumed: they say how long, where, how fast and how often, not what is computed
# (device, dtype, compile, flash and loss_chunk change rounding only). Whatever else differs, it would be another run.
MAY_CHANGE = {'out_dir', 'init_from', 'overwrite', 'max_iters', 'eval_interval', 'eval_iters', 'eval_only', 'log_interval',
              'keep', 'prompt', 'wandb_log', 'wandb_project', 'wandb_run_name', 'device', 'dtype', 'compile', 'flash',
              'loss_chunk', 'backend', 'dataset'}  # dataset is compared by the sha256 of its files
FORMAT = 'qk-coupling train.py 1'  # stands in every checkpoint
PEAK_FLOPS = {'H100 PCIe': 756e12, 'H100': 989e12, 'H200': 989e12, 'A100': 312e12}  # dense bf16, from the data sheets

rank, local_rank, world_size, restarts = (int(os.environ.get(name, default)) for name, default in (  # set by torchrun
    ('RANK', 0), ('LOCAL_RANK', 0), ('WORLD_SIZE', 1), ('TORCHELASTIC_RESTART_COUNT', 0)))

# ----------------------------------------------------------------------------------------------------------------------
# the pieces, each usable on its own

def get_batch(tokens, seed, step, n_windows, block_size, rows=slice(None), device='cpu'):
    """Inputs and targets, two (rows, block_size) int64 tensors: the chosen rows of the `n_windows` windows of a step.

    The windows are a pure function of (seed, step), so every variant, and a run split over any number of devices and
    micro-steps, trains on the same ones. `tokens` is a 1-D array, or the pair (inputs, labels) of Corpus.rows.
    """
    rng = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
    if isinstance(tokens, tuple):
        chosen = rng.integers(len(tokens[0]), size=n_windows)[rows]
        x, y = tokens[0][chosen], tokens[1][chosen]
    else:
        starts = rng.integers(len(tokens) - block_size, size=n_windows)[rows]
        windows = np.stack([tokens[i:i + block_size + 1] for i in starts])
        x, y = windows[:, :-1], windows[:, 1:]
    return to_tensor(x, device), to_tensor(y, device)


def to_tensor(ids, device):
    ids = torch.from_numpy(ids.astype(np.int64))
    return ids if device == 'cpu' else ids.pin_memory().to(device, non_blocking=True)


def seed_dropout(seed, step, piece):
    """Dropout of a micro-step depends on (seed, step, piece) only, so there is no state to save."""
    torch.manual_seed(int(np.random.SeedSequence((seed, step, piece)).generate_state(1)[0]))


def lr_at(step, learning_rate, min_lr, warmup_iters, lr_decay_iters, decay_lr=True):
    """Learning rate of update `step` (0, 1, ...): linear warmup, cosine to min_lr at lr_decay_iters, min_lr after it."""
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    if not decay_lr:
        return learning_rate
    if step >= lr_decay_iters:
        return min_lr
    ratio = (step - warmup_iters) / (lr_decay_iters - warmup_iters)  # warmup_iters <= step < lr_decay_iters
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def eval_batches(tokens, block_size, batch_size):
    """All of a split as pairs (inputs, targets): windows that do not overlap, at the end a batch of the partial window."""
    if isinstance(tokens, tuple):
        for i in range(0, len(tokens[0]), batch_size):
            yield tokens[0][i:i + batch_size], tokens[1][i:i + batch_size]
        return
    n = len(tokens) - 1  # each token but the first is a target once
    full = n // block_size * block_size
    for lo in range(0, full, batch_size * block_size):
        hi = min(lo + batch_size * block_size, full)
        yield tokens[lo:hi].reshape(-1, block_size), tokens[lo + 1:hi + 1].reshape(-1, block_size)
    if full < n:
        yield tokens[None, full:n], tokens[None, full + 1:]


@torch.no_grad()
def evaluate(model, tokens, block_size, batch_size, device='cpu', autocast=nullcontext(), eval_iters=0, loss_chunk=0):
    """(mean negative log-likelihood in nats per token, tokens scored); perplexity is its exp.

    The protocol: the whole split in windows that do not overlap, each token but the first scored once, the partial
    window at the end included, summed in float64. eval_iters > 0 stops after so many batches. Under torchrun the batches
    are dealt out to the ranks, whose sums are added: the number does not depend on how many there are.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=device)  # negative log-likelihood, tokens
    for x, y in islice(eval_batches(tokens, block_size, batch_size), rank, eval_iters or None, world_size):
        n = int((y != -1).sum())
        with autocast:
            loss = model(to_tensor(x, device), to_tensor(y, device), loss_chunk=loss_chunk)[1]
        total[0] += loss.double() * n
        total[1] += n
    if dist.is_initialized():
        dist.all_reduce(total)
    model.train(was_training)
    nll, n = total.tolist()
    return nll / n, int(n)


def save_checkpoint(state, path):
    """Write a checkpoint so that `path` is at every moment the whole old file or the whole new one.

    Raises ValueError when a weight is not finite and OSError with the reason when the file cannot be written; in both
    cases the old file stays.
    """
    bad = [name for name, weight in state['model'].items() if not torch.isfinite(weight).all()]
    if bad:
        raise ValueError(f'{path} not written: weights that are not finite in ' + ', '.join(bad[:5]))
    tmp = path + '.tmp'
    try:
        with open(tmp, 'wb') as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:
        if os.path.exists(tmp):
            os.remove(tmp)
        while not isinstance(e, OSError) and e.__context__:  # torch hides the failed write behind an error of its own
            e = e.__context__
        raise OSError(f'cannot write {path}: {e}; the checkpoint before it is untouched') from None


def read_checkpoint(path):
    """(state, None), or (None, what is wrong with the file). weights_only: no pickled code runs."""
    try:
        state = torch.load(path, map_location='cpu', weights_only=True)
    except OSError as e:
        return None, e.strerror
    except Exception as e:  # torch has a dozen ways to fail on bytes that are no checkpoint
        return None, f'truncated, or of another program: {type(e).__name__}'
    if not isinstance(state, dict) or state.get('format') != FORMAT:
        return None, f'its format is not {FORMAT!r}'
    return state, None


def load_checkpoint(path):
    """The dict that save_checkpoint wrote, on the CPU. If it cannot be had, stop and offer the newest that can."""
    state, problem = read_checkpoint(path)
    if problem:
        others = set(glob.glob(os.path.join(glob.escape(os.path.dirname(path)), '*.pt'))) - {path}
        good = next((f for f in sorted(others, key=os.path.getmtime, reverse=True) if not read_checkpoint(f)[1]), None)
        refuse(f'{path} is no checkpoint of train.py ({problem})' +
               (f'\n{good} beside it is sound. To go on from there: cp {good} {path}' if good else ''))
    return state


def prune_metrics(path, step, evaluated, max_iters):
    """Drop the lines of metrics.jsonl that stand after the checkpoint, so that the run can go on writing after `step`.

    Those were written by a run that was then killed, or ended a run that was shorter than it now shall be.
    """
    kept = []
    if os.path.exists(path):
        with open(path, encoding='utf-8', errors='replace') as f:
            for line in f:
                try:
                    record = json.loads(line)
                    done = evaluated if 'val_loss' in record else step
                    if record['step'] <= done and not (record.get('final') and step < max_iters):
                        kept.append(line)
                except (ValueError, LookupError, TypeError):
                    pass  # half a line: the run was killed in the middle of it
    with open(path + '.tmp', 'w', encoding='utf-8') as f:
        f.writelines(kept)
        f.flush()
        os.fsync(f.fileno())
    os.replace(path + '.tmp', path)


def load_weights(model, weights, path):
    """Warm start: copy `weights` into the model. Only a coupling may be missing from them: it starts as the identity."""
    own = model.state_dict()
    problems = [f'missing: {k}' for k in own if k not in weights and '.coupling.' not in k]
    problems += [f'not in this model: {k}' for k in weights if k not in own]
    problems += [f'shape of {k}: {tuple(weights[k].shape)} in the file, {tuple(own[k].shape)} in this model'
                 for k in own if k in weights and weights[k].shape != own[k].shape]
    if problems:
        refuse(f'{path} does not fit the model that the settings describe:\n  ' + '\n  '.join(problems))
    model.load_state_dict(weights, strict=False)
    return [k for k in own if k not in weights]


def differences(state, settings, corpus):
    """One line for each way in which the run of a checkpoint is not the run that the settings describe."""
    was = {**defaults, **state['config'], 'vocab_size': state['model_args']['vocab_size'], **state['data']['sha256']}
    now = {**settings, 'vocab_size': corpus.vocab_size, **corpus.sha256}
    names = {split: f'sha256 of {split}.bin' for split in ('train', 'val', 'test')}
    lines = [f'{names.get(k, k)}: {was.get(k)!r} in the checkpoint, {now[k]!r} now'
             for k in now if k not in MAY_CHANGE and k != 'test' and was.get(k) != now[k]]
    if state['tokenizer'] != corpus.tokenizer_state:
        lines.append(f'tokenizer: {str(state["tokenizer"])[:60]} in the checkpoint, {str(corpus.tokenizer_state)[:60]} now')
    return lines


def say(message):
    if rank == 0:
        print(message, flush=True)


def refuse(message):
    """End the run with a message, once a machine."""
    sys.exit(f'error: {message}' if local_rank == 0 else 1)


def on_rank_0(function, *args):
    """The result of function(*args), called on rank 0 while the others wait. If it fails, all ranks stop together."""
    result, error = None, None
    if rank == 0:
        try:
            result = function(*args)
        except (OSError, ValueError, prepare.DataError) as e:
            error = str(e)
    if dist.is_initialized():
        box = [result, error]
        dist.broadcast_object_list(box, src=0)
        result, error = box
    if error is not None:
        refuse(error)
    return result


def check(cfg):
    """Refuse values that cannot work; those of the model are checked by GPTConfig."""
    def need(ok, key, expected):
        if not ok:
            refuse(f'{key} = {getattr(cfg, key)!r}, expected {expected}')
    for key in 'batch_size', 'gradient_accumulation_steps', 'block_size', 'eval_interval', 'log_interval':
        need(getattr(cfg, key) >= 1, key, 'at least 1')
    for key in ('max_iters', 'eval_iters', 'keep', 'seed', 'learning_rate', 'min_lr', 'warmup_iters', 'lr_decay_iters',
                'weight_decay', 'grad_clip', 'loss_chunk'):
        need(getattr(cfg, key) >= 0, key, 'at least 0')
    for key in 'beta1', 'beta2':
        need(0 <= getattr(cfg, key) < 1, key, 'a number in [0, 1)')
    need(cfg.gradient_accumulation_steps % world_size == 0, 'gradient_accumulation_steps',
         f'a multiple of {world_size}, the number of processes')
    need(re.fullmatch(r'auto|cpu|cuda(:\d+)?', cfg.device), 'device', 'auto, cpu, cuda or cuda:N')
    need(world_size == 1 or ':' not in cfg.device, 'device', 'auto, cpu or cuda with several processes')
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cfg.device.startswith('cuda') or cfg.device == 'auto' and gpus:
        need(int(cfg.device[5:] or local_rank) < gpus, 'device', f'a GPU for each process, but PyTorch {torch.__version__} sees '
             f'{gpus} here; --device=cpu works anywhere')
    need(cfg.dtype in ('auto', 'float32', 'bfloat16', 'float16'), 'dtype', 'auto, float32, bfloat16 or float16')
    need(cfg.compile.lower() in ('auto', 'true', 'false'), 'compile', 'auto, True or False')
    need(cfg.backend in ('auto', 'gloo') or cfg.backend == 'nccl' and gpus and cfg.device != 'cpu', 'backend',
         'auto, gloo or, on GPUs, nccl')
    need(cfg.out_dir, 'out_dir', 'the name of a folder')
    need(cfg.init_from in ('auto', 'scratch', 'resume') or os.path.isfile(cfg.init_from), 'init_from',
         'auto, scratch, resume or the path of a checkpoint')
    need(not cfg.wandb_log or importlib.util.find_spec('wandb'), 'wandb_log', 'wandb to be installed: pip install wandb')


def git_commit():
    """Commit of the folder of this file, '-dirty' if it was edited since; None without git."""
    command = ['git', '-C', os.path.dirname(os.path.abspath(__file__)), 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

# ----------------------------------------------------------------------------------------------------------------------

def main(argv):
    """Train, or with eval_only evaluate. Returns the exit status: 0, or 128 + the signal that ended the run."""
    settings = configure(defaults, argv)
    cfg = SimpleNamespace(**settings)
    check(cfg)
    say(textwrap.fill(' '.join(f'{k}={v!r}' for k, v in settings.items()), 120, break_long_words=False, break_on_hyphens=False))

    # device and processes
    kind = 'cuda' if cfg.device.startswith('cuda') or cfg.device == 'auto' and torch.cuda.is_available() else 'cpu'
    device = cfg.device if ':' in cfg.device else f'cuda:{local_rank}' if kind == 'cuda' else 'cpu'
    if kind == 'cuda':
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision('high')  # TF32
    if world_size > 1:
        store = None
        if restarts and int(os.environ['LOCAL_WORLD_SIZE']) == world_size:
            # torchrun's store outlives a restart and still holds the addresses of the dead processes: use fresh names
            store = dist.PrefixStore(f'restart {restarts}', next(dist.rendezvous('env://'))[0])
        backend = cfg.backend if cfg.backend != 'auto' else 'nccl' if kind == 'cuda' else 'gloo'
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    dtype = cfg.dtype
    if dtype == 'auto':
        dtype = 'float32' if kind == 'cpu' else 'bfloat16' if torch.cuda.is_bf16_supported(False) else 'float16'
    autocast = nullcontext() if dtype == 'float32' else torch.amp.autocast(kind, getattr(torch, dtype))

    # data
    if cfg.dataset == 'pydocs' and not os.path.exists(os.path.join(prepare.DATA_DIR, 'pydocs')):
        on_rank_0(prepare.prepare, 'pydocs')
    corpus = prepare.open_corpus(cfg.dataset)
    row_length = corpus.meta.get('row_length')  # of a corpus of rows with labels (mqar)
    if row_length and row_length > cfg.block_size:
        refuse(f'block_size = {cfg.block_size}, but {corpus.path} has rows of {row_length} tokens: --block_size={row_length}')
    for split in 'train', 'val':
        corpus.require(split, cfg.block_size)
    read = corpus.rows if row_length else corpus.tokens
    train, val = read('train'), read('val')
    prompt = corpus.tokenizer.encode_ordinary(cfg.prompt) if cfg.prompt else None

    # model
    args = {f.name: settings[f.name] for f in fields(GPTConfig) if f.name in settings}
    try:
        raw_model = GPT(GPTConfig(vocab_size=corpus.vocab_size, **args), cfg.seed)
    except ValueError as e:
        refuse(e)

    # where the run stands: step is the number of updates made, evaluated the step of the last evaluation
    step, evaluated, best_val_loss, interval = 0, -1, math.inf, dict(loss=0.0, steps=0, seconds=0.0)
    last = os.path.join(cfg.out_dir, 'last.pt')
    old = on_rank_0(lambda: [f for f in glob.glob(os.path.join(glob.escape(cfg.out_dir), '*'))
                             if re.fullmatch(r'(last|best|ckpt_\d+)\.pt|metrics\.jsonl', os.path.basename(f))])
    if restarts:
        cfg.overwrite = False  # a restart by torchrun erases nothing
    state, fresh = None, True
    if cfg.init_from == 'resume' or cfg.init_from == 'auto' and any(f.endswith('.pt') for f in old):
        state, fresh = load_checkpoint(last), False
        if lines := differences(state, settings, corpus):
            refuse(f'{last} is of a run with other settings:\n  ' + '\n  '.join(lines) + '\nGive the same settings to go on '
                   'with it, another --out_dir for a new run, or --init_from=scratch --overwrite=True to erase it')
        step, evaluated, interval = state['iter_num'], state['evaluated'], state['interval']
        if settings['eval_iters'] == state['config']['eval_iters']:  # else the losses cannot be compared
            best_val_loss = state['best_val_loss']
        if step > cfg.max_iters and not cfg.eval_only:
            refuse(f'max_iters = {cfg.max_iters}, but {last} is already at step {step}')
        raw_model.load_state_dict(state.pop('model'))
        say(f'resuming {last} at step {step}')
    elif cfg.init_from != 'auto' and old and not cfg.overwrite and not cfg.eval_only:
        refuse(f'{cfg.out_dir} holds a run. To go on with it: --init_from=auto. To erase it: --overwrite=True')
    elif cfg.init_from not in ('auto', 'scratch'):
        start = load_checkpoint(cfg.init_from)
        if start['tokenizer'] != corpus.tokenizer_state:
            refuse(f'{cfg.init_from} was trained with another tokenizer than that of {corpus.path}')
        new = load_weights(raw_model, start['model'], cfg.init_from)
        say(f'new run from {cfg.init_from}' + (f', beside it new: {", ".join(new)}' if new else ''))
        del start
    else:
        say('new run')
    raw_model.to(device)

    def evaluate_on(tokens):
        return evaluate(raw_model, tokens, cfg.block_size, cfg.batch_size, device, autocast, cfg.eval_iters, cfg.loss_chunk)

    def sample():
        if prompt and rank == 0:
            ids = torch.tensor([prompt], device=device)
            raw_model.eval()
            with autocast:
                ids = raw_model.generate(ids, 200, temperature=0.8, top_k=200, seed=cfg.seed)
            say('-' * 40 + '\n' + corpus.tokenizer.decode(ids[0].tolist()) + '\n' + '-' * 40)

    if cfg.eval_only:
        for split in ('val', 'test') if 'test' in corpus.sha256 else ('val',):
            loss, n = evaluate_on(read(split))
            say(f'step {step}: {split} loss {loss:.4f}, perplexity {perplexity(loss):.2f} per token, {n:,} tokens scored')
        sample()
        return 0

    # optimizer; compile and DDP wrap the model for training, all else uses raw_model and its clean names
    scaler = torch.amp.GradScaler(kind, enabled=dtype == 'float16')
    optimizer = raw_model.configure_optimizers(cfg.weight_decay, cfg.learning_rate, (cfg.beta1, cfg.beta2), kind)
    if state:
        for saved, group in zip(state['optimizer']['param_groups'], optimizer.param_groups):
            saved['fused'] = group['fused']  # the device may have changed
        optimizer.load_state_dict(state.pop('optimizer'))
        if state['scaler']:
            scaler.load_state_dict(state['scaler'])
    del state
    model = raw_model
    if cfg.compile.lower() == 'true' or cfg.compile.lower() == 'auto' and kind == 'cuda':
        model = torch.compile(model)
    if world_size > 1:
        model = DistributedDataParallel(model, device_ids=[device] if kind == 'cuda' else None)

    # the run folder; from here on files are written
    metrics_path = os.path.join(cfg.out_dir, 'metrics.jsonl')

    def open_folder():
        os.makedirs(cfg.out_dir, exist_ok=True)
        for file in old if fresh else ():
            os.remove(file)
        prune_metrics(metrics_path, step, evaluated, cfg.max_iters)
    on_rank_0(open_folder)
    if cfg.wandb_log and rank == 0:
        import wandb
        wandb.init(project=cfg.wandb_project, name=cfg.wandb_run_name or None, config=settings)

    def log(record):
        if rank == 0:
            with open(metrics_path, 'a', encoding='utf-8') as f:
                f.write(json.dumps(record) + '\n')
            if cfg.wandb_log and 'config' not in record:
                wandb.log(record, step=record['step'])

    def save(*names):
        state = dict(format=FORMAT, model=raw_model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(),
                     model_args=asdict(raw_model.config), config=settings, iter_num=step, evaluated=evaluated,
                     best_val_loss=best_val_loss, interval=interval, tokenizer=corpus.tokenizer_state,
                     data=dict(name=corpus.name, sha256=corpus.sha256))

        def write():
            for name in names:
                save_checkpoint(state, os.path.join(cfg.out_dir, name))
            numbered = sorted(glob.glob(os.path.join(glob.escape(cfg.out_dir), 'ckpt_*.pt')), key=os.path.getmtime)
            for file in numbered[:-cfg.keep] if cfg.keep else ():
                os.remove(file)
        on_rank_0(write)

    signals = []  # SIGTERM and SIGINT end the run after the step they arrive in
    for number in signal.SIGTERM, signal.SIGINT:
        signal.signal(number, lambda number, frame: signals.append(number))
    name = torch.cuda.get_device_name() if kind == 'cuda' else platform.processor() or platform.machine()
    peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name and dtype != 'float32'), None)
    flops_per_token = raw_model.estimate_flops()
    n_windows = cfg.gradient_accumulation_steps * cfg.batch_size
    micro_steps = cfg.gradient_accumulation_steps // world_size
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__)
    log(dict(step=step, config=settings, versions=versions, device=name, dtype=dtype, processes=world_size,
             commit=git_commit(), parameters=raw_model.get_num_params(), flops_per_token=flops_per_token))
    say(f'{raw_model.get_num_params():,} parameters, {n_windows * cfg.block_size:,} tokens an update, {len(corpus.tokens("train")):,} tokens in '
        f'{corpus.name}; {world_size} x {name}, {dtype}')

    status, loss, norm = 0, math.nan, math.nan
    while True:
        if (step % cfg.eval_interval == 0 or step == cfg.max_iters) and evaluated != step:
            val_loss, n = evaluate_on(val)
            if not math.isfinite(val_loss):
                refuse(f'the validation loss is {val_loss} at step {step}; {last} is untouched')
            evaluated = step
            best = step > 0 and val_loss < best_val_loss  # step 0 is no result of this run
            best_val_loss = val_loss if best else best_val_loss
            final = dict(final=True) if step % cfg.eval_interval else {}
            log(dict(step=step, val_loss=val_loss, val_perplexity=perplexity(val_loss), **final))
            say(f'step {step}: val loss {val_loss:.4f}, perplexity {perplexity(val_loss):.2f} per token, {n:,} tokens scored'
                + (', the best' if best else ''))
            # last.pt is the last file to be written, so a run killed in between repeats this; it is the first at step 0
            save(*['best.pt'] * best, *[f'ckpt_{step:06d}.pt'] * (cfg.keep > 0 and step > 0), 'last.pt')
        if step == cfg.max_iters:
            break

        # one update: forward and backward over the micro-steps of this rank
        t0 = time.perf_counter()
        lr = lr_at(step, cfg.learning_rate, cfg.min_lr, cfg.warmup_iters, cfg.lr_decay_iters, cfg.decay_lr)
        for group in optimizer.param_groups:
            group['lr'] = lr
        my_loss = 0.0
        for micro_step in range(micro_steps):
            piece = micro_step * world_size + rank  # 1 process x 4 micro-steps and 2 x 2 compute the same four pieces
            rows = slice(piece * cfg.batch_size, (piece + 1) * cfg.batch_size)
            x, y = get_batch(train, cfg.seed, step, n_windows, cfg.block_size, rows, device)
            seed_dropout(cfg.seed, step, piece)
            if world_size > 1:  # sync gradients in the last micro-step only; DDP reads this in the forward
                model.require_backward_grad_sync = micro_step == micro_steps - 1
            with autocast:
                micro_loss = model(x, y, loss_chunk=cfg.loss_chunk)[1] / micro_steps
            scaler.scale(micro_loss).backward()
            my_loss += micro_loss.detach()
        scaler.unscale_(optimizer)
        my_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), cfg.grad_clip or math.inf)

        # the ranks tell each other loss, gradient norm and signal, so that they stop together, before the weights change
        table = torch.zeros(world_size, 3, dtype=torch.float64, device=device)
        table[rank, 0], table[rank, 1], table[rank, 2] = my_loss, my_norm, max(signals, default=0)
        if world_size > 1:
            dist.all_reduce(table)
        losses, norms, stops = table.T.tolist()
        bad = [r for r in range(world_size) if not math.isfinite(losses[r])]
        if not bad and scaler.get_scale() <= 1:  # else float16, whose scaler skips an update that overflows and scales less
            bad = [r for r in range(world_size) if not math.isfinite(norms[r])]
        if bad:
            refuse(f'diverged in update {step + 1} on rank {", ".join(map(str, bad))}: loss {losses[bad[0]]}, gradient norm '
                   f'{norms[bad[0]]}; the last finite ones were loss {loss}, gradient norm {norm}. {last} is untouched; a lower '
                   '--learning_rate or --grad_clip, or a longer --warmup_iters, may help')
        loss, norm = sum(losses) / world_size, norms[0] if math.isfinite(norms[0]) else norm
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        step += 1

        interval['loss'] += loss
        interval['steps'] += 1
        interval['seconds'] += time.perf_counter() - t0
        if step % cfg.log_interval == 0 or step == cfg.max_iters:
            seconds = interval['seconds'] / interval['steps']
            mean = interval['loss'] / interval['steps']
            tok_s = n_windows * cfg.block_size / seconds
            mfu = flops_per_token * tok_s / (peak * world_size) if peak else None
            final = dict(final=True) if step % cfg.log_interval else {}
            log(dict(step=step, loss=mean, lr=lr, grad_norm=norm, tok_s=tok_s, tflops=flops_per_token * tok_s / 1e12, mfu=mfu, **final))
            eta = round((cfg.max_iters - step) * seconds)
            say(f'step {step}: loss {mean:.4f}, lr {lr:.2e}, grad norm {norm:.2f}, {tok_s:,.0f} tok/s, '
                f'{flops_per_token * tok_s / 1e12:.3f} TFLOP/s, MFU {f"{mfu:.1%}" if peak else "n/a"}, '
                f'ETA {eta // 3600}:{eta // 60 % 60:02}:{eta % 60:02}')
            if not final:
                interval = dict(loss=0.0, steps=0, seconds=0.0)
        if any(stops):
            number = signal.Signals(int(max(stops)))
            save('last.pt')
            say(f'stopped by {number.name} at step {step}, {last} is saved; to go on: the same command, --init_from=auto')
            status = 128 + number
            break

    if cfg.wandb_log and rank == 0:
        wandb.finish()
    if status == 0:
        sample()
    return status


def perplexity(loss):
    return math.exp(min(loss, 700))  # a float ends there


def leave(status):
    """End the process with the exit status of main. Of several ranks not by sys.exit: a thread of gloo may still release a tensor, and
    aborts if Python is half gone by then; and torchrun's SIGTERM to the later ones would meet no handler any more."""
    if dist.is_initialized():
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def explain(e):
    """The message for an error that is not a bug here, else None."""
    text = str(e).splitlines()[0] if str(e) else type(e).__name__
    if isinstance(e, (ConfigError, prepare.DataError, OSError)):
        return str(e)
    if isinstance(e, (MemoryError, torch.OutOfMemoryError)) or 'not enough memory' in text:
        return f'out of memory ({text}). Smaller: --batch_size (with more --gradient_accumulation_steps), or --loss_chunk=1024'
    if type(e).__module__.startswith(('torch._dynamo', 'torch._inductor')):
        return f'torch.compile failed ({text}). --compile=False runs without it'


if __name__ == '__main__':
    try:
        status = main(sys.argv[1:])
    except KeyboardInterrupt:  # before the first update
        sys.exit(128 + signal.SIGINT)
    except Exception as e:
        message = explain(e)
        if message is None:
            raise
        refuse(message)
    leave(status)
