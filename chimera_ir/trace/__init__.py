"""What ``train.py --trace`` recorded, beside what the schedule promised: lanes, residuals, and where the bubble was."""
