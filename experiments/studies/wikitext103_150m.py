"""
[v2], WikiText-103 at 150M: validation perplexity of the coupling under each scoring method.

Published: mean and sample std of 3 seeds. Ours: optimizer, batch and steps (config/wikitext103_150m.py); the scale cpu.
"""
scales = {
    'full': dict(config='config/wikitext103_150m.py', seeds=[1, 2, 3], nproc=8),
    'cpu': dict(config='config/study_cpu.py', seeds=[1, 2, 3]),
}
cells = {
    'standard': dict(attention='standard'),
    'one_way': dict(attention='standard', coupling='one_way'),
    'alternating': dict(attention='standard', coupling='alternating'),
    'diff': dict(attention='diff'),
    'diff+alternating': dict(attention='diff', coupling='alternating'),
    'diff+simultaneous': dict(attention='diff', coupling='simultaneous'),
    'mta': dict(attention='mta'),
    'mta+alternating': dict(attention='mta', coupling='alternating'),
    'qk_norm': dict(qk_norm=True),
    'qk_norm+alternating': dict(qk_norm=True, coupling='alternating'),
}
comparisons = [('standard', 'one_way'), ('standard', 'alternating'), ('diff', 'diff+alternating'), ('diff', 'diff+simultaneous'),
               ('mta', 'mta+alternating'), ('qk_norm', 'qk_norm+alternating')]
published = {'standard': (21.61, 0.03), 'one_way': (21.53, 0.05), 'alternating': (21.45, 0.06),
             'diff': (21.10, 0.08), 'diff+alternating': (20.92, 0.02), 'diff+simultaneous': (22.17, 0.04),
             'mta': (20.96, 0.05), 'mta+alternating': (20.85, 0.12), 'qk_norm': (22.25, 0.05), 'qk_norm+alternating': (21.96, 0.05)}
