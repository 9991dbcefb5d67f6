"""
Sample text from a checkpoint of train.py, token by token as it is made.

    python experiments/sample.py --ckpt=out/tiny/best.pt --prompt='The module provides'
"""
import codecs
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from configurator import ConfigError, configure
from experiments.evaluate import load, set_up, tokenizer_of
from prepare import DataError
from train import refuse

ckpt = ''                  # the checkpoint
prompt = '\n'              # text to continue
num_samples = 1            # continuations, each drawn anew
max_new_tokens = 200       # tokens of each
temperature = 0.8          # 0: always the likeliest token; 1: as the model says; higher: more random
top_k = 200                # keep so many of the likeliest tokens; 0: all
seed = 1337                # of the draws, >= 0; sample i takes seed + i
device = 'auto'            # auto | cpu | cuda | cuda:N
dtype = 'auto'             # auto | float32 | bfloat16 | float16
defaults = {k: v for k, v in globals().items() if k[0] != '_' and type(v) in (bool, int, float, str)}


def main(argv):
    cfg = SimpleNamespace(**configure(defaults, argv))
    for key, least in dict(num_samples=1, max_new_tokens=1, temperature=0, top_k=0, seed=0).items():
        if getattr(cfg, key) < least:
            refuse(f'--{key}={getattr(cfg, key)}: expected {least} or more')
    if not cfg.prompt:
        refuse("--prompt is empty, but the model needs a text to continue: --prompt='Once upon'")
    device, autocast = set_up(cfg.device, cfg.dtype)
    model, state = load(cfg.ckpt, device)
    tokenizer = tokenizer_of(state, cfg.ckpt)
    ids = torch.tensor([tokenizer.encode_ordinary(cfg.prompt)], device=device)

    sys.stdout.reconfigure(errors='replace')
    for i in range(cfg.num_samples):
        print(cfg.prompt, end='', flush=True)
        decoder = codecs.getincrementaldecoder('utf-8')('replace')  # a character may be split over tokens
        with autocast:
            for token in model.stream(ids, cfg.max_new_tokens, cfg.temperature, cfg.top_k or None, cfg.seed + i):
                print(decoder.decode(tokenizer.decode_single_token_bytes(token.item())), end='', flush=True)
        print(decoder.decode(b'', final=True) + '\n' + '-' * 40)


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except (ConfigError, DataError) as e:
        refuse(e)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
