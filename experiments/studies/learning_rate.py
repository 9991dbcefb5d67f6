"""
Ours: the learning rate of the small model, chosen for standard attention and for Differential Attention without the coupling.
Validation perplexity.

A coupled model takes the rate of its base, so that a difference between the two is not one of tuning (it may favour the base).
"""
cells = {f'{corpus}/lr_{rate}': dict(dataset=corpus, learning_rate=rate, min_lr=rate / 10)
         for corpus in ('wiki_summaries', 'brown') for rate in (1e-3, 2e-3, 4e-3, 8e-3)}
_diff = {f'{corpus}/diff_lr_{rate}': dict(dataset=corpus, attention='diff', learning_rate=rate, min_lr=rate / 10)
         for corpus in ('wiki_summaries', 'brown') for rate in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)}
scales = {  # a seed that no comparison uses
    'pilot': dict(config='config/study_cpu.py', seeds=[101], cells={name: s for name, s in cells.items() if 'wiki' in name}),
    'cpu': dict(config='config/study_cpu.py', seeds=[101], settings=dict(max_iters=700, lr_decay_iters=700, warmup_iters=70)),
    'diff': dict(config='config/study_cpu.py', seeds=[101], cells=_diff, settings=dict(
        max_iters=600, lr_decay_iters=600, warmup_iters=180)),
}
