"""
Ours: the learning rate of the small model, chosen for standard attention alone and then used for every variant. Validation perplexity.

Choosing it for each variant would be fairer to each and cost as many runs again; this way a treatment can only lose by it.
"""
scales = {'cpu': dict(config='config/study_cpu.py', seeds=[101])}  # a seed that no comparison uses
cells = {f'{corpus}/lr_{rate}': dict(dataset=corpus, learning_rate=rate, min_lr=rate / 10)
         for corpus in ('wiki_summaries', 'brown') for rate in (1e-3, 2e-3, 4e-3, 8e-3)}
