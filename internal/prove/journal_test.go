package prove

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// answerBody is kept byte for byte.
const answerBody = "{\"id\":\"\\u00e4\"}\n"

func TestJournal(t *testing.T) {
	t.Parallel()

	read := func(t *testing.T, path string) (entries []entry, torn bool) {
		t.Helper()
		j, torn, err := openJournal(path, func(e entry) error {
			entries = append(entries, e)
			return nil
		})
		require.NoError(t, err)
		require.NoError(t, j.close())
		return entries, torn
	}
	// make writes a journal of three entries.
	write := func(t *testing.T) string {
		t.Helper()
		path := filepath.Join(t.TempDir(), "journal.jsonl")
		j, err := createJournal(path)
		require.NoError(t, err)
		_, err = j.add(entry{Kind: entryBegin, Begin: &beginning{Seed: 42}})
		require.NoError(t, err)
		_, err = j.put(entry{Kind: entrySend, Op: 1, Attempt: 1, Request: &request{Action: actPlace}})
		require.NoError(t, err)
		_, err = j.add(entry{Kind: entryAnswer, Op: 1, Attempt: 1, Answer: &answer{Status: 201, Body: answerBody}})
		require.NoError(t, err)
		require.NoError(t, j.close())
		return path
	}

	t.Run("IsOnTheDiskWhenAddReturns", func(t *testing.T) {
		t.Parallel()
		path := filepath.Join(t.TempDir(), "journal.jsonl")
		j, err := createJournal(path)
		require.NoError(t, err)
		var group sync.WaitGroup
		for client := range 20 {
			group.Go(func() {
				for op := range 20 {
					id := int64(1 + client*20 + op)
					if _, err := j.add(entry{Kind: entrySend, Op: id}); err != nil {
						t.Error(err)
						return
					}
					text, err := os.ReadFile(path)
					if err != nil || !bytes.Contains(text, fmt.Appendf(nil, `"op":%d}`, id)) {
						t.Errorf("request %d may be sent, and is not in the file (%v)", id, err)
						return
					}
				}
			})
		}
		group.Wait()
		require.NoError(t, j.close())
		entries, torn := read(t, path)
		require.False(t, torn)
		require.Len(t, entries, 400)
		for i, e := range entries[1:] {
			require.Equal(t, entries[i].Seq+1, e.Seq)
			require.Greater(t, e.At, entries[i].At)
		}
	})

	t.Run("GoesOnWhereItEnded", func(t *testing.T) {
		t.Parallel()
		path := write(t)
		j, torn, err := openJournal(path, func(entry) error { return nil })
		require.NoError(t, err)
		require.False(t, torn)
		e, err := j.add(entry{Kind: entryResume})
		require.NoError(t, err)
		require.Equal(t, int64(4), e.Seq)
		require.NoError(t, j.close())
		entries, _ := read(t, path)
		require.Len(t, entries, 4)
		require.Zero(t, strings.Compare(answerBody, entries[2].Answer.Body))
	})

	// Whoever dies while it writes leaves any part of a line, the line end too.
	t.Run("CutsOffALastLineThatIsTorn", func(t *testing.T) {
		t.Parallel()
		whole, err := os.ReadFile(write(t))
		require.NoError(t, err)
		second := bytes.LastIndexByte(whole[:len(whole)-1], '\n') + 1
		for length := second + 1; length < len(whole); length++ {
			path := filepath.Join(t.TempDir(), "journal.jsonl")
			require.NoError(t, os.WriteFile(path, whole[:length], 0o600))
			entries, torn := read(t, path)
			require.True(t, torn, "%d of %d bytes", length, len(whole))
			require.Len(t, entries, 2)
			left, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, string(whole[:second]), string(left))
		}
	})

	t.Run("RefusesOneThatIsDamagedInTheMiddle", func(t *testing.T) {
		t.Parallel()
		path := write(t)
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		lines := bytes.SplitAfter(text, []byte("\n"))
		require.NoError(t, os.WriteFile(path, bytes.Join([][]byte{lines[0], []byte("{\"seq\":2,\n"), lines[2]}, nil), 0o600))
		_, _, err = openJournal(path, func(entry) error { return nil })
		require.ErrorContains(t, err, "line 2 is damaged")

		require.NoError(t, os.WriteFile(path, bytes.Join([][]byte{lines[0], lines[2]}, nil), 0o600))
		_, _, err = openJournal(path, func(entry) error { return nil })
		require.ErrorContains(t, err, "entry 3 follows entry 1: lines are missing")
	})

	t.Run("Digest", func(t *testing.T) {
		t.Parallel()
		path := write(t)
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		sum, size, err := digest(path)
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("%x", sha256.Sum256(text)), sum)
		require.Equal(t, int64(len(text)), size)
	})

	t.Run("OneThatCannotBeWrittenSendsNothing", func(t *testing.T) {
		t.Parallel()
		path := write(t)
		j, _, err := openJournal(path, func(entry) error { return nil })
		require.NoError(t, err)
		require.NoError(t, j.file.Close())
		_, err = j.add(entry{Kind: entrySend, Op: 2})
		require.ErrorContains(t, err, "write the journal")
		_, err = j.add(entry{Kind: entrySend, Op: 3})
		require.ErrorContains(t, err, "write the journal")
	})
}
