"""Which replica?"""
