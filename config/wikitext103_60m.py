# The 60M model of the paper on WikiText-103, for 8 H100s:
#
#     python prepare.py wikitext103
#     torchrun --standalone --nproc_per_node=8 train.py config/wikitext103_60m.py --attention=diff --coupling=alternating
#
# The paper publishes sizes, length 512 and results (validation perplexity per GPT-2 token 24.20 for standard, 23.92 for
# alternating, 3 seeds), but neither optimizer nor batch nor steps: all below the model is ours.

out_dir = 'out/wikitext103_60m'
dataset = 'wikitext103'

n_layer = 8
n_head = 8
n_embd = 512
block_size = 512

# 32 windows x 8 GPUs x 512 = 131,072 tokens an update; 18,000 updates = 2.36B tokens, 20 passes over 118M
batch_size = 32
gradient_accumulation_steps = 8  # over all GPUs; on one GPU it accumulates 8 times, for the same run
max_iters = 18000
lr_decay_iters = max_iters
warmup_iters = 1000
learning_rate = 1e-3
min_lr = learning_rate / 10
weight_decay = 0.1
dropout = 0.1  # 20 passes overfit without

eval_interval = 1000
log_interval = 20
