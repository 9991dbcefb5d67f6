"""
[v2], Table 7: accuracy of multi-query associative recall, 4 and 8 key-value pairs in rows of 64, 128 and 256 tokens.

Published: means of 3 seeds of the tiny model. Ours: rows, batch, steps and optimizer (config/mqar.py); at the scale cpu a smaller
model (config/mqar_cpu.py) on 4 pairs in 64 tokens of a small vocabulary. evaluate.py scores 2,000 rows. One GPU: --jobs=1; eight: --jobs=8.
"""
_variants = {
    'standard': dict(attention='standard'),
    'alternating': dict(attention='standard', coupling='alternating'),
    'diff': dict(attention='diff'),
    'diff+alternating': dict(attention='diff', coupling='alternating'),
}
_published = {(4, 64): (0.98, 1.00, 1.00, 1.00), (4, 128): (0.94, 1.00, 1.00, 1.00), (4, 256): (0.92, 0.99, 1.00, 1.00),
              (8, 64): (0.55, 0.18, 1.00, 1.00), (8, 128): (0.79, 0.72, 1.00, 1.00), (8, 256): (0.73, 0.51, 1.00, 1.00)}
cells = {f'kv{kv}_len{length}/{name}': dict(dataset=f'mqar_{kv}_{length}', block_size=length, **settings)
         for kv, length in _published for name, settings in _variants.items()}
published = dict(zip(cells, sum(_published.values(), ())))
comparisons = [(f'kv{kv}_len{length}/{base}', f'kv{kv}_len{length}/{treatment}') for kv, length in _published
               for base, treatment in (('standard', 'alternating'), ('diff', 'diff+alternating'))]
scales = {
    'full': dict(config='config/mqar.py', seeds=[1, 2, 3]),
    'cpu': dict(config='config/mqar_cpu.py', seeds=[1, 2, 3],
                cells={f'kv4_len64/{name}': settings for name, settings in _variants.items()}),
}
corpora = {f'mqar_{kv}_{length}': f'mqar --kv={kv} --len={length} --out=mqar_{kv}_{length}' for kv, length in _published}
corpora['mqar_4_64_small'] = 'mqar --kv=4 --len=64 --vocab=64 --filler=zero --out=mqar_4_64_small'
tasks = 'mqar'
measure = 'mqar'
