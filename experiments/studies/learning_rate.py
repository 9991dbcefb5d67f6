"""
Ours: the learning rate of the small model, chosen for standard attention alone and then used for every variant. Validation perplexity.

Choosing it for each variant would be fairer to each and cost as many runs again.
"""
cells = {f'{corpus}/lr_{rate}': dict(dataset=corpus, learning_rate=rate, min_lr=rate / 10)
         for corpus in ('wiki_summaries', 'brown') for rate in (1e-3, 2e-3, 4e-3, 8e-3)}
scales = {  # a seed that no comparison uses
    'pilot': dict(config='config/study_cpu.py', seeds=[101], cells={name: s for name, s in cells.items() if 'wiki' in name}),
    'cpu': dict(config='config/study_cpu.py', seeds=[101], settings=dict(max_iters=700, lr_decay_iters=700, warmup_iters=70)),
}
