// A list that draws only what is on the screen, however long it is.

import { html, useLayoutEffect, useRef, useState } from "./vendor/preact.js";

const BEYOND = 8; // rows drawn above and below what is seen

export function VirtualList({ count, height, render, label, onRange, listRef, stick, header, className = "" }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, size: 0 });

  const measure = () => {
    const { scrollTop, clientHeight } = box.current;
    setView((old) => (old.top === scrollTop && old.size === clientHeight ? old : { top: scrollTop, size: clientHeight }));
  };
  useLayoutEffect(() => {
    measure();
    const watcher = new ResizeObserver(measure);
    watcher.observe(box.current);
    return () => watcher.disconnect();
  }, []);

  const first = Math.max(0, Math.floor(view.top / height) - BEYOND);
  const last = Math.min(count, Math.ceil((view.top + view.size) / height) + BEYOND);
  useLayoutEffect(() => onRange && onRange(first, last), [first, last, count]);

  // Whoever looks at the end of a list that grows stays at the end.
  const atEnd = useRef(true);
  useLayoutEffect(() => {
    if (stick && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [count, stick]);

  if (listRef) {
    listRef.current = {
      reveal(index) {
        const top = index * height;
        const { scrollTop, clientHeight } = box.current;
        if (top < scrollTop) box.current.scrollTop = Math.max(0, top - height);
        else if (top + height > scrollTop + clientHeight) box.current.scrollTop = top + 2 * height - clientHeight;
      },
      centre(index) {
        box.current.scrollTop = Math.max(0, index * height - box.current.clientHeight / 3);
      },
      focus() {
        box.current.focus({ preventScroll: true });
      },
    };
  }

  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    atEnd.current = scrollTop + clientHeight >= scrollHeight - 2 * height;
    measure();
  };
  const drawn = [];
  for (let index = first; index < last; index++) drawn.push(render(index));
  return html`<div class="list ${className}" ref=${box} onScroll=${onScroll} tabindex="0" role="list" aria-label=${label}>
    ${header}
    <div class="list-space" style=${{ height: `${count * height}px` }}>
      <div class="list-rows" style=${{ transform: `translateY(${first * height}px)` }}>${drawn}</div>
    </div>
  </div>`;
}
