"""
[v2], Table 13: does the gain of the coupling grow or shrink with training? 455M, the evaluations of the runs of wikitext103_455m.

Published, relative difference of validation perplexity in %:

    step                          8K     15K     22K     29K
    alternating / standard     -0.31   -0.73   -0.79   -0.34
    diff+alternating / diff    -0.37   -0.66   -0.65   -0.65

Ours: optimizer and batch. At the scale cpu the steps are those of config/study_cpu.py.
"""
runs_of = 'wikitext103_455m'
cells = ['standard', 'alternating', 'diff', 'diff+alternating']
comparisons = [('standard', 'alternating'), ('diff', 'diff+alternating')]
