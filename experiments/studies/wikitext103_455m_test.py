"""
[v2], WikiText-103 at 455M: TEST perplexity of the runs of wikitext103_455m.py.

Published: mean and sample std.
"""
runs_of = 'wikitext103_455m'
cells = ['standard', 'alternating', 'diff', 'diff+alternating']
comparisons = [('standard', 'alternating'), ('diff', 'diff+alternating')]
published = {'standard': (21.79, 0.05), 'alternating': (21.76, 0.02), 'diff': (21.02, 0.04), 'diff+alternating': (20.88, 0.07)}
tasks = 'ppl'
measure = 'ppl.perplexity_per_token'
