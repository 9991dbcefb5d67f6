"""
Ours: can a coupling be added to a trained model? From the end of one standard run, with the same further updates: `warm` with the
alternating coupling, which starts as the identity, `continued` without. Validation perplexity.

No paper has this table. The further updates warm up and decay once more.
"""
def _cells(updates, warmup, rate):
    further = dict(init_from='cell:standard', max_iters=updates, lr_decay_iters=updates, warmup_iters=warmup, learning_rate=rate,
                   min_lr=rate / 5)
    return {'standard': {}, 'continued': further, 'warm': dict(coupling='alternating', **further)}

scales = {
    # a third of the updates of `standard`, from half its learning rate
    'full': dict(config='config/wikitext103_60m.py', seeds=[1, 2, 3], nproc=8, cells=_cells(6000, 500, 5e-4)),
    'cpu': dict(config='config/study_cpu.py', seeds=[1, 2, 3], cells=_cells(100, 10, 1e-3)),
}
comparisons = [('continued', 'warm')]
