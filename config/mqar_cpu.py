# Multi-query associative recall on two CPU cores: rows of 64 tokens that state 4 key-value pairs and then ask for them.
#
#     python prepare.py mqar --kv=4 --len=64 --vocab=64 --filler=zero --out=mqar_4_64_small
#     python train.py config/mqar_cpu.py
#     python experiments/evaluate.py --ckpt=out/mqar_cpu/last.pt --tasks=mqar --limit=0
#
# The model and the vocabulary are smaller than in config/mqar.py. All values are ours.

out_dir = 'out/mqar_cpu'
dataset = 'mqar_4_64_small'  # 31 keys, 32 values, 0 between the questions (Zoology: 8192 tokens)

n_layer = 2  # one brings each value the key before it, one finds the key that is asked
n_head = 4
n_embd = 128
d_ff = 16  # recall needs no MLP (Zoology's models have none); the usual 512 would be three quarters of a layer's products
block_size = 64

# 64 rows x 4 questions = 256 answers an update; 2500 updates = 160,000 rows, 1.6 passes over the 100,000
batch_size = 64
gradient_accumulation_steps = 1
max_iters = 2500
lr_decay_iters = max_iters
warmup_iters = 50
learning_rate = 5e-4  # at twice that, diff+alternating of seed 2 still guesses among the 4 values at the end
min_lr = learning_rate / 10
loss_chunk = 512  # the head then runs on the 4 asked positions of a row only

eval_interval = 250
eval_iters = 16  # 16 batches of 64 rows; evaluate.py scores all
log_interval = 50
