# Multi-query associative recall on two CPU cores: rows of 64 tokens that state 4 key-value pairs and then ask for them.
#
#     python prepare.py mqar --kv=4 --len=64 --out=mqar_4_64
#     python train.py config/mqar_cpu.py
#     python experiments/evaluate.py --ckpt=out/mqar_cpu/last.pt --tasks=mqar --limit=0
#
# The model is smaller than the paper's (config/mqar.py). All values are ours; the vocabulary of 8192 and the task are Zoology's.

out_dir = 'out/mqar_cpu'
dataset = 'mqar_4_64'

n_layer = 2  # one brings each value the key before it, one finds the key that is asked
n_head = 4
n_embd = 128
block_size = 64

# 64 rows x 4 questions = 256 answers an update; 2250 updates = 144,000 rows, 1.4 passes over the 100,000
batch_size = 64
gradient_accumulation_steps = 1
max_iters = 2250
warmup_iters = 50
learning_rate = 3e-3
decay_lr = False  # when a run finds the solution differs; a decayed rate would miss it
loss_chunk = 512  # the head then runs on the 4 asked positions of a row only

eval_interval = 250
eval_iters = 16  # 16 batches of 64 rows; evaluate.py scores all
log_interval = 50
