"""
[v2], Table 18: the coupling with RoPE in place of learned positions, WikiText-103 at 60M. Validation perplexity.

Published: mean and sample std; learned positions are those of the table at 60M (wikitext103_60m.py). Ours: optimizer, batch and
steps, and the scale cpu, on other data.
"""
scales = {
    'full': dict(config='config/wikitext103_60m.py', seeds=[1, 2, 3], nproc=8),
    'cpu': dict(config='config/study_cpu.py', seeds=[1, 2, 3]),
}
cells = {f'{pos}/{coupling if coupling != "none" else "standard"}': dict(pos=pos, coupling=coupling)
         for pos in ('learned', 'rope') for coupling in ('none', 'alternating')}
comparisons = [('learned/standard', 'learned/alternating'), ('rope/standard', 'rope/alternating')]
published = {'learned/standard': (24.20, 0.13), 'learned/alternating': (23.92, 0.04),
             'rope/standard': (25.84, 0.07), 'rope/alternating': (24.00, 0.03)}
