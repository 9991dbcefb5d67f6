"""
Ours: does a second and a third round of the alternating coupling, with nets of their own, help? Validation perplexity.

No paper has this table; [v2] uses one round.
"""
scales = {
    'full': dict(config='config/wikitext103_60m.py', seeds=[1, 2, 3], nproc=8),
    'cpu': dict(config='config/study_cpu.py', seeds=[1, 2, 3]),
}
cells = {'standard': {}} | {f'rounds_{n}': dict(coupling='alternating', coupling_rounds=n) for n in (1, 2, 3)}
comparisons = [('standard', 'rounds_1'), ('rounds_1', 'rounds_2'), ('rounds_2', 'rounds_3')]
