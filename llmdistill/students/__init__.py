"""Factorizes a teacher's matrices into products of two smaller ones, and saves, loads and merges the result.

svd (MaKD eq. 10-11): n × m is a matrix as MaKD writes it (y = x W, n inputs, m outputs), k its rank after truncation.
kronecker (KroneckerBERT eq. 1-8): W (m, n) as that paper writes it (y = W x), a sum of A (m1, n1) ⊗ B (m2, n2).
"""
