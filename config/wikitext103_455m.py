# The 455M model of the paper on WikiText-103, for 8 H100s:
#
#     torchrun --standalone --nproc_per_node=8 train.py config/wikitext103_455m.py --attention=diff --coupling=alternating
#
# Published: about 29,000 updates, checkpoints quoted at 8K, 15K, 22K and 29K; validation perplexity standard 19.56,
# alternating 19.48, diff 18.89, diff+alternating 18.79. All below the model, but for max_iters, is ours.

out_dir = 'out/wikitext103_455m'
dataset = 'wikitext103'

n_layer = 24
n_head = 16
n_embd = 1024
block_size = 512

# 16 windows x 8 GPUs x 512 = 65,536 tokens an update; 29,000 updates = 1.90B tokens, 16 passes over 118M
batch_size = 16
gradient_accumulation_steps = 8
max_iters = 29000
lr_decay_iters = max_iters
warmup_iters = 1500
learning_rate = 4e-4
min_lr = learning_rate / 10
weight_decay = 0.1
dropout = 0.1

eval_interval = 1000
log_interval = 20
keep = 29  # a checkpoint of every evaluation, 8K, 15K, 22K and 29K among them
