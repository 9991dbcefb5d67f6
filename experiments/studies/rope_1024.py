"""
[v2], WikiText-103 at 455M with RoPE at length 1024: validation perplexity of the coupling under Differential Attention.

Published: mean and sample std of 3 seeds; on the test split diff 20.13 (0.08), diff+alternating 19.81 (0.06). Ours: optimizer and
batch, and the scale cpu: RoPE at length 256, on other data.
"""
scales = {
    # 8 windows x 8 GPUs x 1024 = 65,536 tokens an update, as at length 512
    'full': dict(config='config/wikitext103_455m.py', settings=dict(pos='rope', block_size=1024, batch_size=8, keep=0),
                 seeds=[1, 2, 3], nproc=8),
    'cpu': dict(config='config/study_cpu.py', settings=dict(pos='rope'), seeds=[1, 2, 3]),
}
cells = {'diff': dict(attention='diff'), 'diff+alternating': dict(attention='diff', coupling='alternating')}
comparisons = [('diff', 'diff+alternating')]
published = {'diff': (19.50, 0.03), 'diff+alternating': (19.20, 0.05)}
tasks = 'ppl'
