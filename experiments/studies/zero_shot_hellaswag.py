"""
[v2], zero-shot at 150M: HellaSwag length-normalized accuracy of the runs of wikitext103_150m.py, on 2,000 examples.

Published: accuracies without a spread; at 455M: standard 0.303, alternating 0.297, diff 0.306, diff+alternating 0.310. Ours: which
2,000 examples, and the length: in characters, as lm-evaluation-harness has it. Chance is 0.25.
"""
runs_of = 'wikitext103_150m'
cells = ['standard', 'alternating', 'diff', 'diff+alternating']
comparisons = [('standard', 'alternating'), ('diff', 'diff+alternating')]
published = {'standard': 0.313, 'alternating': 0.317, 'diff': 0.307, 'diff+alternating': 0.315}
tasks = 'lambada,hellaswag'
measure = 'hellaswag.per_character'
