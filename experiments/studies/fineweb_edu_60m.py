"""
[v2], FineWeb-Edu at 60M, 2 seeds: does the gain hold on other text? Validation perplexity.

Published: the two values of each cell, below. Ours: optimizer, batch and steps (config/wikitext103_60m.py, without dropout: less
than one pass over the text), the text's share, and the scale cpu, whose other text is Brown.
"""
import statistics

scales = {
    'full': dict(config='config/wikitext103_60m.py', settings=dict(dataset='fineweb_edu', dropout=0.0), seeds=[1, 2], nproc=8),
    'cpu': dict(config='config/study_cpu.py', settings=dict(dataset='brown'), seeds=[1, 2]),
}
corpora = {'fineweb_edu': 'fineweb_edu --max_tokens=2500000000'}  # 18,000 updates x 131,072 = 2.36B tokens
cells = {
    'standard': dict(attention='standard'),
    'alternating': dict(attention='standard', coupling='alternating'),
    'diff': dict(attention='diff'),
    'diff+alternating': dict(attention='diff', coupling='alternating'),
}
comparisons = [('standard', 'alternating'), ('diff', 'diff+alternating')]
_seeds = {'standard': (45.34, 45.25), 'alternating': (44.66, 44.89), 'diff': (45.31, 44.94), 'diff+alternating': (44.20, 44.50)}
published = {cell: (statistics.mean(two), statistics.stdev(two)) for cell, two in _seeds.items()}
