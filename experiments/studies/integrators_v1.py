"""
[v1], WikiText-103 at 60M: integrators of coupled query-key dynamics against their uncoupled control. Validation perplexity.

Published: mean and sample std. Ours: optimizer, batch and steps (config/wikitext103_60m.py), the first step size 0.1, and the scale
cpu, on other data.
"""
scales = {
    'full': dict(config='config/wikitext103_60m.py', seeds=[1, 2, 3], nproc=8),
    'cpu': dict(config='config/study_cpu.py', seeds=[1, 2, 3]),
}
cells = {'standard': {}} | {name: dict(coupling=name) for name in ('mlp_only', 'euler', 'leapfrog')}
comparisons = [('standard', 'mlp_only'), ('standard', 'euler'), ('standard', 'leapfrog'),
               ('mlp_only', 'euler'), ('mlp_only', 'leapfrog')]
published = {'standard': (24.22, 0.12), 'mlp_only': (23.81, 0.31), 'euler': (22.55, 0.04), 'leapfrog': (22.62, 0.04)}
