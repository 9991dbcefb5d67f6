# The README's run: the composition that the paper recommends, Differential Attention with alternating coupling, at the
# paper's tiny size, on text that every Python brings along. 2 CPU cores, at most 5 minutes.
#
#     python train.py config/tiny.py
#
# The same without the coupling, or without both, is one flag away:
#     python train.py config/tiny.py --coupling=none --out_dir=out/tiny_diff

out_dir = 'out/tiny'
dataset = 'pydocs'  # prepared on the spot

n_layer = 6
n_head = 4
n_embd = 256
attention = 'diff'
coupling = 'alternating'

# 4 windows x 256 tokens = 1,024 tokens an update; 500 updates = 512,000 tokens, less than one pass
block_size = 256
batch_size = 4
gradient_accumulation_steps = 1
max_iters = 500
lr_decay_iters = max_iters
warmup_iters = 50
learning_rate = 2e-3
min_lr = learning_rate / 10
loss_chunk = 512  # faster and smaller than whole logits on a CPU

eval_interval = 250
log_interval = 25
prompt = 'The module provides'
