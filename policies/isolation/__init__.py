"""Who may share a prefix?"""
