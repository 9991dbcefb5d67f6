# The 153M model of the paper on WikiText-103, for 8 H100s:
#
#     torchrun --standalone --nproc_per_node=8 train.py config/wikitext103_150m.py --attention=diff --coupling=alternating
#
# Published validation perplexity at this size: standard 21.61, alternating 21.45, diff 21.10, diff+alternating 20.92.
# All below the model is ours.

out_dir = 'out/wikitext103_150m'
dataset = 'wikitext103'

n_layer = 12
n_head = 12
n_embd = 768
block_size = 512

# 32 windows x 8 GPUs x 512 = 131,072 tokens an update; 18,000 updates = 2.36B tokens, 20 passes over 118M
batch_size = 32
gradient_accumulation_steps = 8
max_iters = 18000
lr_decay_iters = max_iters
warmup_iters = 1000
learning_rate = 6e-4
min_lr = learning_rate / 10
weight_decay = 0.1
dropout = 0.1

eval_interval = 1000
log_interval = 20
