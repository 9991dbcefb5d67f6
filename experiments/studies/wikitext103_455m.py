"""
[v2], WikiText-103 at 455M: validation perplexity of the coupling under each scoring method.

Published: mean and sample std of 3 seeds, of 6 for diff and diff+alternating. Test perplexities are in wikitext103_455m_test.py.
Ours: optimizer and batch (config/wikitext103_455m.py), and the scale cpu, on other data.
"""
scales = {
    # without the numbered checkpoints of the config, 5.5 GB each
    'full': dict(config='config/wikitext103_455m.py', settings=dict(keep=0), seeds=[1, 2, 3], nproc=8),
    'cpu': dict(config='config/study_cpu.py', seeds=[1, 2, 3]),
}
_six = [1, 2, 3, 4, 5, 6]
cells = {
    'standard': dict(attention='standard'),
    'alternating': dict(attention='standard', coupling='alternating'),
    'diff': dict(attention='diff', seeds=_six),
    'diff+alternating': dict(attention='diff', coupling='alternating', seeds=_six),
    'diff+cross_mlp': dict(attention='diff', coupling='cross_mlp'),
    'diff+simultaneous': dict(attention='diff', coupling='simultaneous'),
    'mta': dict(attention='mta'),
    'mta+alternating': dict(attention='mta', coupling='alternating'),
    'qk_norm': dict(qk_norm=True),
    'qk_norm+alternating': dict(qk_norm=True, coupling='alternating'),
}
comparisons = [('standard', 'alternating'), ('diff', 'diff+alternating'), ('diff', 'diff+cross_mlp'), ('diff', 'diff+simultaneous'),
               ('mta', 'mta+alternating'), ('qk_norm', 'qk_norm+alternating')]
published = {'standard': (19.56, 0.10), 'alternating': (19.48, 0.07), 'diff': (18.89, 0.04), 'diff+alternating': (18.79, 0.05),
             'diff+cross_mlp': (18.89, 0.11), 'diff+simultaneous': (18.78, 0.07),
             'mta': (19.24, 0.05), 'mta+alternating': (19.20, 0.03),
             'qk_norm': (19.82, 0.02), 'qk_norm+alternating': (19.73, 0.08)}
tasks = 'ppl'
