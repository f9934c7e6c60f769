"""Lesson pages: one offline HTML file each, whose logic is proved equal to the policy core."""
