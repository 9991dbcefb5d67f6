"""
Ours: the learning rate of the small model, chosen for standard attention alone and then used for every variant. Validation perplexity.

Choosing it for each variant would be fairer to each and cost as many runs again.
"""
scales = {'cpu': dict(config='config/study_cpu.py', seeds=[101])}  # a seed that no comparison uses
cells = {f'wiki_summaries/lr_{rate}': dict(dataset='wiki_summaries', learning_rate=rate, min_lr=rate / 10) for rate in (1e-3, 2e-3, 4e-3, 8e-3)}
