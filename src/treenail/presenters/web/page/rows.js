// The rows of a run: pages that are fetched when they are looked at, and changed as the log grows.

import { useEffect, useRef, useState } from "./vendor/preact.js";
import { follow, get } from "./api.js";

const PAGE = 100;
const MAX_PAGES = 30; // what is kept in memory, however long the run is

export function useRun(id) {
  const [, draw] = useState(0);
  const kept = useRef(null);
  kept.current ??= { head: null, error: null, link: "", pages: new Map(), wanted: [0, 0], version: 0 };
  const all = kept.current;
  const again = () => draw((n) => n + 1);

  const fetchPage = async (page) => {
    all.pages.set(page, all.pages.get(page) ?? []);
    try {
      const data = await get(`/api/runs/${id}/rows?first=${page * PAGE}&count=${PAGE}`);
      // An update may have come while this was on its way; the newer one counts.
      const known = all.pages.get(page) ?? [];
      all.pages.set(page, data.rows.map((row, at) => (known[at]?.changed > row.changed ? known[at] : row)));
    } catch (error) {
      all.error = error;
    }
    again();
  };
  const want = (first, last) => {
    all.wanted = [Math.floor(first / PAGE), Math.floor(Math.max(first, last - 1) / PAGE)];
    for (let page = all.wanted[0]; page <= all.wanted[1]; page++) if (!all.pages.has(page)) fetchPage(page);
    for (const page of all.pages.keys()) {
      if (all.pages.size <= MAX_PAGES) break;
      if (page < all.wanted[0] || page > all.wanted[1]) all.pages.delete(page);
    }
  };
  const take = ({ run, rows }) => {
    all.head = { ...all.head, ...run };
    all.version++;
    if (rows === null) {
      // So much has changed that only what is seen is worth asking for.
      for (const page of all.pages.keys()) if (page < all.wanted[0] || page > all.wanted[1]) all.pages.delete(page);
      for (let page = all.wanted[0]; page <= all.wanted[1]; page++) fetchPage(page);
    }
    for (const row of rows ?? []) {
      const page = Math.floor(row.index / PAGE);
      if (all.pages.has(page)) all.pages.get(page)[row.index % PAGE] = row;
    }
    again();
  };

  useEffect(() => {
    let stop = () => {};
    let gone = false;
    get(`/api/runs/${id}`).then(
      (head) => {
        if (gone) return;
        all.head = head;
        again();
        stop = follow(`/api/runs/${id}/stream?after=${head.seq}`, take, (link) => {
          all.link = link;
          again();
        });
      },
      (error) => {
        all.error = error;
        again();
      },
    );
    return () => {
      gone = true;
      stop();
    };
  }, [id]);

  return {
    ...all,
    want,
    row: (index) => all.pages.get(Math.floor(index / PAGE))?.[index % PAGE],
    reload: async () => {
      all.head = { ...all.head, ...(await get(`/api/runs/${id}`)) };
      all.version++;
      again();
    },
  };
}
