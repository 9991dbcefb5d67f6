# The small model of experiments/studies at --scale=cpu: 1.05M parameters without the embeddings, one run on one CPU core in
# one to two minutes.
#
#     python prepare.py wiki_summaries
#     python train.py config/study_cpu.py --attention=diff --coupling=alternating
#     python experiments/sweep.py experiments/studies/cpu_study.py --jobs=2
#
# All values are ours. The learning rate was chosen for the standard model alone, and is used for all. cpu_study goes on from here, with
# twice the updates and a rate chosen for them.

out_dir = 'out/study_cpu'
dataset = 'wiki_summaries'

n_layer = 4
n_head = 4
n_embd = 128
block_size = 256

# 4 windows x 256 tokens = 1,024 tokens an update; 300 updates = 307,200 tokens, a quarter of a pass
batch_size = 4
gradient_accumulation_steps = 1
max_iters = 300
lr_decay_iters = max_iters
warmup_iters = 30
learning_rate = 2e-3
min_lr = learning_rate / 10
loss_chunk = 512  # faster and smaller than whole logits on a CPU

eval_interval = 100
log_interval = 25
