# Multi-query associative recall with the paper's tiny model, on one GPU.
#
#     python prepare.py mqar --kv=8 --len=256 --out=mqar_8_256
#     python train.py config/mqar.py --dataset=mqar_8_256 --block_size=256 --attention=diff --coupling=alternating
#     python experiments/evaluate.py --ckpt=out/mqar/last.pt --tasks=mqar --limit=0
#
# The paper publishes the model, kv 4 and 8 at lengths 64, 128 and 256, and 3 seeds. Batch, steps and optimizer are ours, within
# what Zoology reports (learning rates of 1e-4 to 1e-2, weight decay 0.1, batches of 256 to 512, 100,000 rows).

out_dir = 'out/mqar'
dataset = 'mqar_4_64'

n_layer = 6
n_head = 4
n_embd = 256
block_size = 64  # the length of the rows

# 256 rows an update; 6,000 updates = 15 passes over 100,000 rows
batch_size = 256
gradient_accumulation_steps = 1
max_iters = 6000
lr_decay_iters = max_iters
warmup_iters = 500
learning_rate = 1e-3
min_lr = learning_rate / 10

eval_interval = 500
log_interval = 50
