"""
[v2], zero-shot at 150M: LAMBADA last-token accuracy of the runs of wikitext103_150m.py, on 2,000 examples.

Published: accuracies without a spread; at 455M: standard 0.254, alternating 0.252, diff 0.263, diff+alternating 0.272. HellaSwag is
in zero_shot_hellaswag.py. Ours: which 2,000 examples (drawn by a seed, the same for all). At the scale cpu the models are too small
and their text too short to expect more than chance.
"""
runs_of = 'wikitext103_150m'
cells = ['standard', 'alternating', 'diff', 'diff+alternating']
comparisons = [('standard', 'alternating'), ('diff', 'diff+alternating')]
published = {'standard': 0.259, 'alternating': 0.269, 'diff': 0.274, 'diff+alternating': 0.278}
tasks = 'lambada,hellaswag'
measure = 'lambada.last_token'
