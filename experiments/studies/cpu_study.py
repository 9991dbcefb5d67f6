"""
Ours: the study that two CPU cores can do. The coupling on two corpora: under standard and Differential Attention, and two of its
controls. Validation perplexity.

A model of config/study_cpu.py on Wikipedia summaries and on Brown; 5 seeds, 3 for the controls. A table of its own: model, data
and budget are far smaller than any of the papers'. The scale pilot, with fewer updates, is where the noise was measured first.
"""
_variants = {
    'standard': dict(attention='standard'),
    'alternating': dict(attention='standard', coupling='alternating'),
    'diff': dict(attention='diff'),
    'diff+alternating': dict(attention='diff', coupling='alternating'),
    'simultaneous': dict(attention='standard', coupling='simultaneous', seeds=[1, 2, 3]),
    'cross_mlp': dict(attention='standard', coupling='cross_mlp', seeds=[1, 2, 3]),
}
_corpora = 'wiki_summaries', 'brown'
scales = {
    'pilot': dict(config='config/study_cpu.py', seeds=[1, 2, 3, 4, 5]),  # 300 updates
    'cpu': dict(config='config/study_cpu.py', seeds=[1, 2, 3, 4, 5], settings=dict(
        max_iters=600, lr_decay_iters=600, warmup_iters=180, learning_rate=4e-3, min_lr=4e-4, eval_interval=150)),
}
cells = {f'{corpus}/{name}': dict(dataset=corpus, **settings) for corpus in _corpora for name, settings in _variants.items()}
comparisons = [(f'{corpus}/{base}', f'{corpus}/{treatment}') for corpus in _corpora for base, treatment in (
    ('standard', 'alternating'), ('diff', 'diff+alternating'), ('standard', 'simultaneous'), ('standard', 'cross_mlp'))]
