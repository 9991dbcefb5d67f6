"""
[v2], WikiText-103 at 60M: validation perplexity of each coupling and of its controls, standard attention.

Published: mean and sample std of 3 seeds. Of grouped queries, with a quarter of the key heads, we have the parameter count
(57,197,568, Table 14), not the perplexity. Ours: optimizer, batch and steps (config/wikitext103_60m.py); the scale cpu, on
other data.
"""
scales = {
    'full': dict(config='config/wikitext103_60m.py', seeds=[1, 2, 3], nproc=8),
    'cpu': dict(config='config/study_cpu.py', seeds=[1, 2, 3]),
}
_couplings = 'one_way', 'alternating', 'independent', 'cross_mlp', 'linear_mix'
cells = {'standard': {}} | {name: dict(coupling=name) for name in _couplings}
cells['gqa'] = dict(n_kv_head=2)  # of 8 heads at 60M; of 4 at the scale cpu
comparisons = [('standard', name) for name in cells if name != 'standard']
published = {'standard': (24.20, 0.13), 'one_way': (24.04, 0.02), 'alternating': (23.92, 0.04), 'independent': (24.13, 0.03),
             'cross_mlp': (24.04, 0.07), 'linear_mix': (24.34, 0.05)}
