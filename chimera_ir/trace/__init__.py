"""Comparison of a run recorded by ``train.py --trace`` with its prediction: lanes, residuals, causes of the bubble."""
