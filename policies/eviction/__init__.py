"""Which cached block goes?"""
