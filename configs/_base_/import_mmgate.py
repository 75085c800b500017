# The first base of every config that inherits mmseg's. mmengine reads bases one after another, and under the maintained
# forks it finds `mmseg::` only once mmgate is imported: `custom_imports`, which it reads last, comes too late.
__import__('mmgate')
